"""What a stream to an output processor sends, in which order, and what it believes."""

from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.pending_request import PendingRequest
from tokenloom.services.gateway.mesh.process_stream import ProcessStream
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.services.runtime.streams.slotted_stream import INITIAL_CREDIT, WrongFrame
from tokenloom.v1.output_processor_pb2 import ProcessFrame, ProcessInput, RequestFinished, SlotTextLogprobs, Submit
from tokenloom.v1.types_pb2 import Logprobs, Pooled


class Sent:
    """A stream whose messages are not written."""

    def __init__(self) -> None:
        self.stream = ProcessStream(None)  # type: ignore[arg-type]

    def submit(self, request_id: str = "r", *, sought: bool = False) -> int:
        submit = Submit(request_id=request_id, take_over=True)
        kept, budget = AdmissionLimit(0), RetryBudget(lambda: 0.0)
        until = 9.0 if sought else 0.0
        request = PendingRequest(submit, Collector(1), 0, kept, budget, now=0.0, sought_until=until)
        return self.stream.seek(request) if sought else self.stream.submit(request)

    @property
    def messages(self) -> list[ProcessInput]:
        return list(self.stream._outbox)


async def test_requests_share_a_message_and_so_do_ends() -> None:
    sent = Sent()
    slots = [sent.submit(), sent.submit(), sent.submit(sought=True), sent.submit(sought=True)]
    for slot in slots:
        sent.stream.cancel(slot)
    sent.stream.withdraw("other", "a")
    (message,) = sent.messages
    assert [each.slot for each in message.submit] + [each.slot for each in message.resume] == slots
    assert list(message.cancel_slots) == slots


async def test_the_repeat_of_a_cancelled_request_comes_after_its_end() -> None:
    """In one message the output processor began the repeat first, and then ended it."""
    sent = Sent()
    sent.stream.cancel(sent.submit())
    sent.submit()
    sent.stream.withdraw("r", "a")
    sent.submit(sought=True)
    first, second, third = sent.messages
    assert (len(first.submit), len(first.cancel_slots)) == (1, 1)
    assert (len(second.submit), len(second.withdraw)) == (1, 1)
    assert (len(third.resume), len(third.withdraw)) == (1, 0)


async def test_a_request_that_begins_after_one_that_resumes_comes_after_it() -> None:
    sent = Sent()
    sent.submit(sought=True)
    sent.submit()
    sent.submit(sought=True)
    first, second = sent.messages
    assert (len(first.resume), len(first.submit)) == (1, 0)
    assert (len(second.submit), len(second.resume)) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": []},
        {"logprob": []},
        {"sampled": [nan]},
        {"token_id": [9]},
        {"sampled_text": []},
        {"token_text": [b"a", b"b"]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_log_probabilities_that_are_none_are_not_believed(wrong: dict[str, Any]) -> None:
    owner: Any = SimpleNamespace(vocab_size=9)
    texts: dict[str, Any] = {"sampled_text": [b"a"], "token_text": [b"a"]}
    columns: dict[str, Any] = {"sampled": [-1.0], "rank": [1], "top": 1, "token_id": [8], "logprob": [-1.0]}

    def frame(**fields: Any) -> ProcessFrame:
        texts_of = {name: fields.get(name, value) for name, value in texts.items()}
        columns_of = {name: fields.get(name, value) for name, value in columns.items()}
        return ProcessFrame(logprobs=[SlotTextLogprobs(logprobs=Logprobs(**columns_of), **texts_of)])

    stream = ProcessStream(owner)
    list(stream.receive(frame()))
    with pytest.raises(WrongFrame, match="log probabilities"):
        list(stream.receive(frame(**wrong)))


@pytest.mark.parametrize(
    "frame",
    [
        ProcessFrame(slot=[9], text=["x"], token_index=[0], token_ids=[1]),
        ProcessFrame(finished=[RequestFinished(slot=9)]),
        ProcessFrame(logprobs=[SlotTextLogprobs(slot=9, prompt=True)]),
        ProcessFrame(pooled=[Pooled(slot=9)]),
        ProcessFrame(found_slots=[9]),
        ProcessFrame(engine_death_slots=[9]),
    ],
)
async def test_each_frame_for_which_credit_was_taken_gives_it_back(frame: ProcessFrame) -> None:
    """Frames of engine deaths alone gave none back: the stream stood still after 64 of them."""
    sent = Sent()
    sent.stream._owner = SimpleNamespace(vocab_size=100)  # type: ignore[assignment]
    for _ in range(INITIAL_CREDIT):
        assert list(sent.stream.receive(frame)) == [None] * (frame.token_index == [0])  # behind a first token
    assert sum(message.credit for message in sent.messages) == INITIAL_CREDIT
