"""Tests which copies of requests a gateway sends, and where."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.loop_clock import pass_time, settle
from tokenloom.process.fall_backs import FallBacks
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.journal_copies import COPY_SECONDS, JournalCopies
from tokenloom.services.gateway.mesh.output_pool import Cancel, OutputPool
from tokenloom.services.gateway.mesh.process_stream import OutputLink, ProcessStream
from tokenloom.services.output_processor.request.kept_requests import CopiedRequests
from tokenloom.services.runtime.streams.slotted_stream import MESSAGE_BYTES
from tokenloom.v1.output_processor_pb2 import JournalCopies as Sent
from tokenloom.v1.output_processor_pb2 import ProcessFrame, RequestFinished, SampleWeights, Submit
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH, Hello, Prompt, RoutedExperts, SamplingParams

ONE, OTHER = "10.0.0.1", "10.0.0.2"
ID = "ab" * 16 + "00000001"


class Gateway:
    """A pool that keeps copies, and the streams to its output processors."""

    def __init__(self, *addresses: str, max_kept_bytes: int = 1 << 20) -> None:
        members: Any = SimpleNamespace(chosen={*addresses}, widen=lambda: None, is_wide=False)
        self.fall_backs = FallBacks()
        self.pool = OutputPool(members, "gateway", 1, None, max_kept_bytes=max_kept_bytes, on_moved=lambda: None)  # type: ignore[arg-type]
        self.links = [OutputLink(address, Hello(), self.pool) for address in addresses]
        self.pool._links.extend(self.links)
        for number, link in enumerate(self.links):
            link.mark = f"{number + 1:08x}"
            self.connect(number)
        self.copies = self.pool._copies = JournalCopies(self.pool._links, self.fall_backs, "demo")

    def connect(self, number: int) -> ProcessStream:
        link = self.links[number]
        stream = link.stream = ProcessStream(self.pool)
        link.changed_at = -math.inf
        stream.keeps_copies, stream.incarnation = True, (link.address, 1)
        return stream

    def lose(self, number: int) -> None:
        stream, self.links[number].stream = self.stream(number), None
        self.pool.on_lost(stream, stream.end())

    def stream(self, number: int) -> ProcessStream:
        stream = self.links[number].stream
        assert stream is not None
        return stream

    def begin(self, collector: Collector, **fields: Any) -> Cancel:
        """Begin a request at the first output processor."""
        given: dict[str, Any] = {"fingerprint": b"body", "sampling_params": SamplingParams(max_tokens=100)}
        given = {"request_id": ID, "tenant": "a", "prompt": Prompt(token_ids=[1, 2]), **given, **fields}
        submit = Submit(**given)
        return self.pool.submit(submit, collector, 0)

    def sent(self, number: int) -> Sent:
        """Take what was sent of copies to an output processor."""
        whole = Sent()
        for message in self.stream(number)._outbox:
            whole.MergeFrom(message.journal_copies)
        self.stream(number)._outbox.clear()
        return whole

    def receive(self, number: int, token_ids: list[int], start: int = 0, **fields: Any) -> None:
        stream = self.stream(number)
        (slot,) = stream.slots
        columns: dict[str, Any] = {
            "slot": [slot],
            "text": ["x"],
            "token_index": [start],
            "num_tokens": [len(token_ids)],
        }
        frame = ProcessFrame(token_ids=token_ids, **columns, **fields)
        parts: list[Any] = [*frame.finished, *frame.weights]
        for part in parts:
            part.slot = slot
        for _ in stream.receive(frame):
            pass


async def test_a_request_is_copied_before_it_is_sent_and_what_comes_of_it_later() -> None:
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1))
    (begun,) = gateway.sent(1).begun
    assert (begun.request_id, begun.fingerprint, list(begun.prompt.token_ids)) == (ID, b"body", [1, 2])
    assert not gateway.sent(0).begun
    await gateway.copies._look()
    assert gateway.sent(1) == Sent(), "nothing is new"
    gateway.receive(0, [5, 6], weights=[SampleWeights(weights=[b"w"], numerics="n")])
    gateway.receive(0, [7], 2)
    await gateway.copies._look()
    ((journal,),) = ((output.journals for output in gateway.sent(1).outputs),)
    assert ([*journal[0].token_ids], [*journal[0].weights], journal[0].numerics) == ([5, 6, 7], [b"w"], "n")
    gateway.receive(0, [8], 3, finished=[RequestFinished(reason=FINISH_REASON_LENGTH, completion_tokens=4)])
    await gateway.copies._look()
    (output,) = gateway.sent(1).outputs
    assert output.copy == begun.slot
    (last,) = output.journals
    assert ([*last.token_ids], last.finished, [*last.weights], last.end.completion_tokens) == ([8], True, [], 4)
    await gateway.copies._look()
    assert gateway.sent(1) == Sent()


async def test_what_no_call_can_resume_is_not_copied() -> None:
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1), fingerprint=b"")
    await gateway.copies._look()
    assert gateway.sent(1) == Sent()
    assert gateway.copies._copies == {}


async def test_the_copy_is_forgotten_with_its_call() -> None:
    gateway = Gateway("a:1", "b:1")
    cancel = gateway.begin(Collector(1))
    number = gateway.sent(1).begun[0].slot
    cancel()
    assert list(gateway.sent(1).ended) == [number]
    cancel()
    assert gateway.sent(1) == Sent()


@pytest.mark.parametrize("is_complete", [True, False])
async def test_the_copy_of_what_has_ended_without_its_client_is_left(is_complete: bool) -> None:
    """The output processor that had the answer was killed before the client came back, and no part had it any more."""
    gateway, collector = Gateway("a:1", "b:1"), Collector(1)
    cancel = gateway.begin(collector)
    number = gateway.sent(1).begun[0].slot
    gateway.receive(0, [5], finished=[RequestFinished(reason=FINISH_REASON_LENGTH, completion_tokens=1)] * is_complete)
    collector.is_unattended = True
    cancel()
    sent = gateway.sent(1)
    assert ([*sent.left], [*sent.ended]) == (([number], []) if is_complete else ([], [number]))
    journals = [(list(each.token_ids), each.finished) for output in sent.outputs for each in output.journals]
    assert journals == [([5], True)] * is_complete


@pytest.mark.parametrize("hosts", [(ONE, ONE, OTHER), (ONE, OTHER, ONE)])
async def test_a_copy_is_on_another_host_where_there_is_one(hosts: tuple[str, ...]) -> None:
    gateway = Gateway(*(f"{host}:{7000 + number}" for number, host in enumerate(hosts)))
    for _ in range(4):
        gateway.begin(Collector(1))
    assert [len(gateway.sent(number).begun) for number in (1, 2)] == [4 * (host == OTHER) for host in hosts[1:]]


async def test_a_copy_moves_when_its_output_processor_is_lost_leaves_or_runs_the_request() -> None:
    gateway, collector = Gateway("a:1", "b:1", "c:1"), Collector(1)
    gateway.begin(collector)
    holder = 1 if gateway.sent(1).begun else 2
    spare = 3 - holder
    gateway.sent(2)
    gateway.receive(0, [5])
    gateway.lose(holder)
    await gateway.copies._look()
    (begun,) = gateway.sent(spare).begun
    assert [list(each.token_ids) for each in begun.journals] == [[5]]
    gateway.connect(holder)
    gateway.stream(spare).leaving = True
    await gateway.copies._look()
    assert list(gateway.sent(spare).ended) == [begun.slot]
    (begun,) = gateway.sent(holder).begun
    gateway.stream(spare).leaving = False
    gateway.lose(0)
    (request,) = gateway.pool._waiting
    gateway.stream(holder).submit(request, again=True)
    assert request.runner is gateway.stream(holder)
    await gateway.copies._look()
    assert [len(gateway.sent(spare).begun), list(gateway.sent(holder).ended)] == [1, [begun.slot]]


async def test_a_request_that_waits_to_be_sent_again_has_a_copy() -> None:
    """Both output processors had been lost. The gateway was killed before it had sent the request again, and no part
    had it any more."""
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1))
    gateway.receive(0, [5])
    gateway.lose(0)
    gateway.lose(1)
    (request,) = gateway.pool._waiting
    await gateway.copies._look()
    gateway.connect(1)
    await gateway.copies._look()
    (begun,) = gateway.sent(1).begun
    assert [list(each.token_ids) for each in begun.journals] == [[5]]
    gateway.connect(0)
    gateway.stream(1).submit(request, again=True)
    await gateway.copies._look()
    assert (len(gateway.sent(0).begun), list(gateway.sent(1).ended)) == (1, [begun.slot])


async def test_the_copy_of_a_later_call_outlives_the_one_before() -> None:
    """An output processor keeps one copy of each id: the end of the earlier call took that of the later one along."""
    gateway = Gateway("a:1", "b:1")
    end_earlier = gateway.begin(Collector(1), take_over=True)
    end_later = gateway.begin(Collector(1), take_over=True)
    earlier, later = gateway.copies._copies
    runner = earlier.runner
    assert runner is later.runner
    number = 0 if runner is gateway.stream(1) else 1
    _, copy = gateway.sent(number).begun
    gateway.lose(number)
    gateway.connect(number)
    await gateway.copies._look()
    assert [each.slot > copy.slot for each in gateway.sent(number).begun][-1]
    await gateway.copies._look()
    assert gateway.sent(number) == Sent(), "both have what they need"
    end_earlier()
    last = gateway.copies._copies[later]
    assert last is not None
    assert last.number not in gateway.sent(number).ended
    end_later()
    assert list(gateway.sent(number).ended) == [last.number]
    assert gateway.copies._calls == {}


async def test_a_call_of_another_tenant_takes_no_copy_away() -> None:
    """It had named the id, and the first one had no copy for as long as it ran."""
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1))
    gateway.begin(Collector(1), tenant="b")
    copies = [CopiedRequests(60.0, 1 << 20) for _ in gateway.links]
    for number, each in enumerate(copies):
        each.receive(gateway, gateway.sent(number))
    assert [sum(each.any_of(ID, tenant) is not None for each in copies) for tenant in "ab"] == [1, 1]


async def test_no_copy_of_an_earlier_call_is_left_behind() -> None:
    """A copy sent in one message with the withdrawal that was to end it stayed as long as its stream, and a call that
    sought the request waited for a gateway that did not have it any more."""
    gateway = Gateway("a:1", "b:1", "c:1")
    ends = [gateway.begin(Collector(1), take_over=True) for _ in range(2)]
    copies = [CopiedRequests(60.0, 1 << 20) for _ in gateway.links]
    for number, each in enumerate(copies):
        each.receive(gateway, gateway.sent(number))
    assert sum(each.num_copies for each in copies) == 1
    for end in ends:
        end()
    for number, each in enumerate(copies):
        each.receive(gateway, gateway.sent(number))
    assert [(each.num_copies, each.num_bytes) for each in copies] == [(0, 0)] * 3


async def test_one_output_processor_is_a_fall_back_until_there_are_two() -> None:
    gateway = Gateway("a:1", "b:1")
    gateway.links[1].stream = None
    gateway.begin(Collector(1))
    await gateway.copies._look()
    assert [each.kind for each in gateway.fall_backs.active] == ["single_journal"]
    gateway.connect(1)
    await gateway.copies._look()
    assert len(gateway.sent(1).begun) == 1
    assert gateway.fall_backs.active == []


async def test_new_tokens_wait_while_an_output_processor_reads_nothing() -> None:
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1))
    for number in range(50):
        gateway.receive(0, [number], number)
        await gateway.copies._look()
    assert len(gateway.stream(1)._outbox) == 1
    assert sum(len(each.journals[0].token_ids) for each in gateway.sent(1).outputs) == 1
    await gateway.copies._look()
    assert [list(each.journals[0].token_ids) for each in gateway.sent(1).outputs] == [[*range(1, 50)]]


async def test_large_ends_are_cut_into_messages() -> None:
    """A message above gRPC's limit ends the stream, and with it all requests that the output processor runs."""
    gateway, size = Gateway("a:1", "b:1", "c:1"), MESSAGE_BYTES * 3 // 5
    for number in range(3):
        gateway.begin(Collector(2), num_samples=2, request_id=f"{number}{ID[1:]}")
        gateway.stream(0)._outbox.clear()
    gateway.sent(1), gateway.sent(2)
    experts = RoutedExperts(num_layers=1, top_k=1, id_bytes=1, expert_ids=bytes(size))
    end = RequestFinished(reason=FINISH_REASON_LENGTH, completion_tokens=1, routed_experts=experts)
    for slot in list(gateway.stream(0).slots):
        columns: dict[str, Any] = {"slot": [slot], "text": ["x"], "token_index": [0], "num_tokens": [1]}
        end.slot = slot
        list(gateway.stream(0).receive(ProcessFrame(token_ids=[5], finished=[end], **columns)))
    await gateway.copies._look()
    messages = [each for number in (1, 2) for each in gateway.stream(number)._outbox]
    assert sum(bool(each.journal_copies.outputs) for each in messages) == 3
    assert max(each.ByteSize() for each in messages) < MESSAGE_BYTES
    gateway.sent(1), gateway.sent(2)
    gateway.lose(2)
    await gateway.copies._look()  # those that were there are copied anew, with the ends
    assert max(each.ByteSize() for each in gateway.stream(1)._outbox) < MESSAGE_BYTES
    gateway.lose(0)
    gateway.sent(1)
    for request in list(gateway.pool._waiting):
        gateway.stream(1).submit(request, again=True)
    assert max(each.ByteSize() for each in gateway.stream(1)._outbox) < MESSAGE_BYTES


async def test_copies_of_requests_with_log_probabilities_have_no_tokens() -> None:
    gateway = Gateway("a:1", "b:1")
    gateway.begin(Collector(1), sampling_params=SamplingParams(logprobs=2))
    gateway.receive(0, [5])
    gateway.sent(1)
    await gateway.copies._look()
    assert gateway.sent(1) == Sent()
    gateway.lose(1)
    gateway.connect(1)
    await gateway.copies._look()
    assert not gateway.sent(1).begun[0].journals


async def test_a_prompt_that_is_not_kept_is_copied_once() -> None:
    gateway = Gateway("a:1", "b:1", max_kept_bytes=1)
    gateway.begin(Collector(1))
    assert len(gateway.sent(1).begun) == 1
    gateway.lose(1)
    gateway.connect(1)
    await gateway.copies._look()
    assert gateway.sent(1) == Sent()
    assert gateway.fall_backs.active == []


async def test_copies_of_other_gateways_are_withdrawn_by_the_one_that_continues() -> None:
    gateway = Gateway("a:1", "b:1", "c:1")
    gateway.begin(Collector(1), take_over=True)
    withdrawn = [[each.request_id for each in gateway.sent(number).withdrawn] for number in range(3)]
    assert withdrawn == [[ID]] * 3


async def test_copies_are_asked_for_when_no_output_processor_runs_the_request() -> None:
    gateway, collector = Gateway("a:1", "b:1"), Collector(1)
    submit = Submit(request_id=ID, fingerprint=b"body", sampling_params=SamplingParams(), tenant="a")
    gateway.pool.resume(submit, collector, 0)
    (request,) = gateway.copies._copies
    asked: list[bool] = []
    for _ in range(4):
        (stream,) = [link.stream for link in gateway.links if link.stream is not None and link.stream.slots]
        asked += [message.resume[0].from_copy for message in stream._outbox if message.resume]
        stream._outbox.clear()
        stream.slots.clear()
        await gateway.copies._look()
        gateway.pool.on_unknown(stream, request)
    assert asked == [False, False, True, True]
    assert gateway.copies._copies == {request: None}, "what runs it is not known"


async def test_it_looks_again_and_again_while_there_is_a_request() -> None:
    gateway = Gateway("a:1", "b:1")
    running = asyncio.create_task(gateway.copies.run())
    cancel = gateway.begin(Collector(1))
    gateway.sent(1)
    gateway.receive(0, [5])
    for token in (6, 7):
        await settle()
        pass_time(COPY_SECONDS)
        await settle()
        assert len(gateway.sent(1).outputs) == 1
        gateway.receive(0, [token], token - 5)
    cancel()
    gateway.sent(1)
    pass_time(10 * COPY_SECONDS)
    await settle()
    assert not running.done()
    running.cancel()
