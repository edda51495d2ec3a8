from typing import Any, cast

import pytest

from tokenloom.request import errors
from tokenloom.services.gateway.generation.beam_run import BeamPlan, BeamRun, BeamTexts, logprobs_of
from tokenloom.services.gateway.mesh.collector import Collector
from tokenloom.services.gateway.mesh.output_pool import Cancel, OutputPool
from tokenloom.services.gateway.mesh.tokenizer_client import TokenizerClient
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2


class Bytes:
    """Decodes a byte for each token; 0 is special; a leading space is dropped, as SentencePiece does."""

    async def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, tenant: str
    ) -> tokenizer_pb2.DecodeResponse:
        text = bytes(i for i in token_ids if i or not skip_special_tokens).decode(errors="replace")
        return tokenizer_pb2.DecodeResponse(text=text.removeprefix(" "))


def submit_of(prompt: bytes, **text: Any) -> output_processor_pb2.Submit:
    return output_processor_pb2.Submit(
        prompt=types_pb2.Prompt(token_ids=prompt), text=output_processor_pb2.TextOptions(**text)
    )


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        (b"Once upon", b" a time", " a time"),
        (b"Once upon\0", b" a\0 time", " a time"),
        ("caf\u00e9".encode()[:-1], "\u00e9!".encode()[1:], "\ufffd!"),
        (b"Once", b"", ""),
    ],
)
async def test_the_text_continues_the_prompt(prompt: bytes, output: bytes, text: str) -> None:
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    assert await texts.text_of(submit_of(prompt), list(output)) == text
    assert await texts.text_of(submit_of(prompt, detokenize=False), list(output)) == ""


async def test_special_tokens_on_request() -> None:
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    assert await texts.text_of(submit_of(b"a", skip_special_tokens=False), [98, 0]) == "b\0"


def row(*token_ids: int) -> output_processor_pb2.SlotTextLogprobs:
    values = [-float(rank) for rank in range(1, len(token_ids) + 1)]
    columns = types_pb2.Logprobs(top=len(token_ids), token_id=token_ids, logprob=values)
    texts = [bytes([token_id]) for token_id in token_ids]
    return output_processor_pb2.SlotTextLogprobs(logprobs=columns, token_text=texts)


@pytest.mark.parametrize("num_best", [0, 1, 3, 2**32 - 1])
def test_log_probabilities_of_a_sequence(num_best: int) -> None:
    joined = logprobs_of([66, 67], [row(65, 66, 68), row(67, 65, 66)], num_best)
    top = min(num_best, 3)
    assert joined.logprobs.top == top
    assert list(joined.logprobs.sampled) == [-2, -1]
    assert list(joined.logprobs.rank) == [2, 1]
    assert list(joined.sampled_text) == [b"B", b"C"]
    assert list(joined.logprobs.token_id) == [65, 66, 68][:top] + [67, 65, 66][:top]
    assert list(joined.token_text) == [b"A", b"B", b"D"][:top] + [b"C", b"A", b"B"][:top]


class Pool:
    """Answers each request with the tokens 65, 66 and 67, or aborts those of chosen names."""

    def __init__(self, *aborted: str) -> None:
        self.aborted = aborted
        self.names: list[str] = []

    def submit(
        self, submit: output_processor_pb2.Submit, collector: Collector, index: int, media: None = None
    ) -> Cancel:
        self.names.append(submit.request_id)
        finished = output_processor_pb2.RequestFinished(reason=types_pb2.FINISH_REASON_ABORT)
        if not submit.request_id.endswith(self.aborted):
            finished.reason, finished.completion_tokens = types_pb2.FINISH_REASON_LENGTH, 1
            collector.put(index, "A", 0, [65], logprobs=[row(65, 66, 67, 68)])
        collector.finish(index, finished)
        return lambda: None


def run_of(pool: Pool) -> BeamRun:
    submit = submit_of(b"a")
    submit.num_samples = submit.sampling_params.max_tokens = 2
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    return BeamRun([submit], BeamPlan(1.0, 4), "r", cast(OutputPool, pool), texts, deadline_ns=10**9, clock=lambda: 0)


async def test_a_step_of_which_an_engine_aborts_a_part_computes_that_part_again() -> None:
    plain, pausing = Pool(), Pool("r-0-1-1", "r-0-1-1-1")
    wanted = [delta.token_ids for delta in await run_of(plain).take()]
    assert [delta.token_ids for delta in await run_of(pausing).take()] == wanted
    assert plain.names == ["r-0-0-0", "r-0-1-0", "r-0-1-1"]
    assert pausing.names == [*plain.names, "r-0-1-1-1", "r-0-1-1-2"]


async def test_a_step_that_is_always_aborted_ends_the_search() -> None:
    pool = Pool("-0", "-1", "-2")
    with pytest.raises(errors.Unavailable, match="aborted a step of the beam search; retry"):
        await run_of(pool).take()
    assert pool.names == ["r-0-0-0", "r-0-0-0-1", "r-0-0-0-2"]


async def test_a_step_that_is_cancelled_is_not_computed_again() -> None:
    pool = Pool("-0")
    run = run_of(pool)
    submit = pool.submit

    def cancelling(*arguments: object) -> Cancel:
        run.cancel()
        return submit(*arguments)  # type: ignore[arg-type]

    pool.submit = cancelling  # type: ignore[assignment, method-assign]
    with pytest.raises(errors.Unavailable):
        await run.take()
    assert pool.names == ["r-0-0-0"]


async def test_each_prompt_goes_on_where_engines_compute_as_for_its_own_first_step() -> None:
    pool = Pool()
    first, second = submit_of(b"a"), submit_of(b"b")
    for submit in (first, second):
        submit.num_samples, submit.sampling_params.max_tokens = 1, 3
    kinds = {0: ("ours", False, "v1"), 1: ("theirs", True, "v2")}
    sent: list[tuple[str, list[str]]] = []

    def answer(submit: output_processor_pb2.Submit, collector: Collector, index: int, media: object = None) -> Cancel:
        number = int(submit.request_id.split("-")[1])
        sent.append((submit.request_id, [each.numerics for each in submit.journals]))
        collector.put(index, "A", 0, [65], logprobs=[row(65, 66, 67, 68)])
        finished = output_processor_pb2.RequestFinished(reason=types_pb2.FINISH_REASON_LENGTH, completion_tokens=1)
        finished.numerics, finished.timeline.mixed_numerics, finished.weights_version = kinds[number]
        collector.finish(index, finished)
        return lambda: None

    pool.submit = answer  # type: ignore[method-assign]
    texts = BeamTexts(cast(TokenizerClient, Bytes()))
    plan, mesh = BeamPlan(1.0, 4), cast(OutputPool, pool)
    run = BeamRun([first, second], plan, "r", mesh, texts, deadline_ns=10**9, clock=lambda: 0)
    ends = [delta.finished for delta in await run.take()]
    assert dict(sent)["r-0-1-0"] == dict(sent)["r-0-2-0"] == ["ours"]
    assert dict(sent)["r-1-1-1"] == dict(sent)["r-1-2-1"] == ["theirs"]
    assert [end and end.timeline.mixed_numerics for end in ends] == [False, True]
    assert [end and end.weights_version for end in ends] == ["v1", "v2"]
