"""Cuts the stream between gateway and output processor after any frame, any number of times: the client's answer is
the one of a stream that was never cut."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.services.output_processor.conftest import byte_level, gemma_unigram, llama_bpe, word_piece
from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.mesh.collector import Collector, Delta
from tokenloom.services.gateway.mesh.pending_request import PendingRequest
from tokenloom.services.gateway.mesh.process_stream import ProcessStream
from tokenloom.services.output_processor.request.outbox import Outbox
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.services.runtime.streams.slotted_stream import ANY_TOKEN
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.output_processor_pb2 import ProcessFrame, Submit, TextOptions
from tokenloom.v1.types_pb2 import FinishReason, Logprobs, Prompt, SamplingParams

LENGTH, STOP = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP
TEXT = "the quick brown fox, naïve café 日本 😀 jumps"
VOCABULARIES = [Vocabulary(make()) for make in (byte_level, llama_bpe, gemma_unigram, word_piece)]


class NoOwner:
    """The test moves the requests itself."""

    vocab_size = ANY_TOKEN

    def on_open(self) -> None: ...

    def on_moved(self, stream: ProcessStream, submission: PendingRequest, error: errors.TokenloomError) -> None:
        raise AssertionError(error.message)

    def on_lost(self, stream: ProcessStream, submissions: list[PendingRequest]) -> None: ...


@dataclass
class Scripted:
    """An output processor whose engines know the tokens of every sample."""

    submit: Submit
    vocabulary: Vocabulary
    scripts: Sequence[Sequence[int]]
    outbox: Outbox = field(default_factory=lambda: Outbox(lambda: None))

    def __post_init__(self) -> None:
        journals = {journal.sample_index: journal for journal in self.submit.journals}
        self.live = [
            SampleOutput(
                self.submit, self.vocabulary, frozenset(), self.outbox, sample_index=index, journal=journals.get(index)
            )
            for index in range(len(self.scripts))
            if index not in journals or not journals[index].finished
        ]
        self.num_prompt = 0
        self.prompt_is_due = self.submit.sampling_params.HasField("prompt_logprobs")
        for output in list(self.live):
            if output.replay() is not None:
                output.stop()
                self.live.remove(output)

    def step(self, sizes: Sequence[int]) -> ProcessFrame:
        """Add so many tokens to each sample that runs, and return the frame."""
        for output, size in zip(list(self.live), sizes, strict=False):
            script, start = self.scripts[output.sample_index], len(output.token_ids)
            if output.sample_index == 0 and self.prompt_is_due and not start:
                self._add_prompt(output)
                continue
            end = min(start + size, len(script))
            if end > start:
                columns = Logprobs(sampled=[-float(i) for i in range(start, end)], rank=range(1, end - start + 1))
                logprobs = columns if self.submit.sampling_params.HasField("logprobs") else None
                output.add(start, script[start:end], logprobs)
            if output.stop_match is not None or end == len(script):
                output.finish(Finished(reason=LENGTH, num_output_tokens=len(output.token_ids)))
                self.live.remove(output)
        return self.outbox.take()

    def _add_prompt(self, output: SampleOutput) -> None:
        """Add the next position, which comes before the first token."""
        count = len(self.submit.prompt.token_ids) - 1
        self.num_prompt += 1
        output.add_prompt_logprobs(self.num_prompt, Logprobs(sampled=[-float(self.num_prompt)], rank=[1]))
        self.prompt_is_due = self.num_prompt < count


@dataclass
class Answer:
    """What the client has of one request."""

    texts: list[str]
    token_ids: list[list[int]]
    ends: list[Any]
    logprobs: list[list[float]]
    prompt: list[float] = field(default_factory=list)

    @classmethod
    def empty(cls, count: int) -> "Answer":
        return cls([""] * count, [[] for _ in range(count)], [None] * count, [[] for _ in range(count)])

    def take(self, delta: Delta) -> None:
        i = delta.index
        self.texts[i] += delta.text
        self.token_ids[i] += delta.token_ids
        self.logprobs[i] += [value for part in delta.logprobs for value in part.logprobs.sampled]
        self.prompt += [value for part in delta.prompt_logprobs for value in part.logprobs.sampled]
        if delta.finished is not None:
            end = delta.finished
            self.ends[i] = (end.reason, end.stop_reason, end.completion_tokens, end.prompt_tokens)


async def run(
    submit: Submit,
    vocabulary: Vocabulary,
    scripts: Sequence[Sequence[int]],
    cuts: Sequence[tuple[int, bool]],
    size: int,
) -> Answer:
    """Answer a request.

    Args:
        cuts: Frames after which each stream is cut, and whether its last frame arrives.
        size: Tokens in a step.
    """
    count = len(scripts)
    collector, answer = Collector(count), Answer.empty(count)
    submission = PendingRequest(submit, collector, 0, AdmissionLimit(1 << 20), RetryBudget(lambda: 0.0), now=0.0)
    for num_frames, arrives in (*cuts, (1 << 20, True)):
        stream = ProcessStream(NoOwner())
        stream.submit(submission, again=submission.withdraw is not None)
        submission.withdraw = lambda: None
        (message,) = stream._outbox
        part = Scripted(message.submit[0], vocabulary, scripts)
        for number in range(num_frames):
            frame = part.step([size] * count)
            if number == num_frames - 1 and not arrives:
                break
            list(stream.receive(frame))
            while not collector.done and (collector._pending or collector.failed):
                for delta in await collector.take():
                    answer.take(delta)
            if collector.done:
                return answer
        assert stream.end() == [submission]
        list(stream.receive(frame))  # a late frame, doubled or not, reaches no client
    raise AssertionError("the request did not end")


@given(
    data=st.data(),
    which=st.integers(0, len(VOCABULARIES) - 1),
    count=st.integers(1, 3),
    cuts=st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
    size=st.integers(1, 3),
)
@settings(max_examples=300, deadline=None)
def test_a_cut_stream_gives_the_answer_of_an_uncut_one(
    data: st.DataObject, which: int, count: int, cuts: list[tuple[int, bool]], size: int
) -> None:
    vocabulary = VOCABULARIES[which]
    num_ids = vocabulary_size(which)
    tokens = st.lists(st.integers(0, num_ids - 1), min_size=1, max_size=12)
    scripts = [data.draw(tokens | st.just(words(which))) for _ in range(count)]
    stop = data.draw(st.lists(st.sampled_from(["ck br", "é ", "fox", "a", "日", "\ufffd", "q"]), max_size=2))
    params = SamplingParams(max_tokens=100, min_tokens=data.draw(st.integers(0, 4)))
    if data.draw(st.booleans()):
        params.logprobs = 0
    if data.draw(st.booleans()):
        params.prompt_logprobs = 0
    text = TextOptions(
        stop=stop,
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        stream_interval=data.draw(st.sampled_from([0, 1, 3])),
    )
    submit = Submit(prompt=Prompt(token_ids=[1, 2, 3]), sampling_params=params, text=text, num_samples=count)
    whole = asyncio.run(run(copy(submit), vocabulary, scripts, (), size))
    assert asyncio.run(run(copy(submit), vocabulary, scripts, cuts, size)) == whole


def copy(submit: Submit) -> Submit:
    copied = Submit()
    copied.CopyFrom(submit)
    return copied


TOKENIZERS: list[Tokenizer] = [byte_level(), llama_bpe(), gemma_unigram(), word_piece()]


def vocabulary_size(which: int) -> int:
    return TOKENIZERS[which].get_vocab_size()


def words(which: int) -> list[int]:
    """Tokens of a text with characters of several bytes."""
    ids: list[int] = TOKENIZERS[which].encode(TEXT, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("which", range(len(TOKENIZERS)))
@pytest.mark.parametrize("stop", [(), ("ck br",), ("café 日",)])
def test_every_cut_of_a_text_with_long_characters(which: int, stop: tuple[str, ...]) -> None:
    script = words(which)
    submit = Submit(prompt=Prompt(token_ids=[1]), sampling_params=SamplingParams(max_tokens=100, logprobs=0))
    submit.text.stop.extend(stop)
    whole = asyncio.run(run(copy(submit), VOCABULARIES[which], [script], (), 1))
    for at in range(1, len(whole.token_ids[0]) + 1):
        for arrives in (False, True):
            answer = asyncio.run(run(copy(submit), VOCABULARIES[which], [script], [(at, arrives)], 1))
            assert answer == whole, at
