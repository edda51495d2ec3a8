"""Sessions whose prompt goes on after it was answered, through all services."""

import asyncio
from collections.abc import Iterator, Sequence
from operator import eq

import grpc
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

EOS = frozenset(CheckpointInfo.load(DEMO_MODEL).eos_token_ids)
MAX_TOKENS = 12


def turn(token_ids: Sequence[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        token_ids=types_pb2.TokenIds(ids=token_ids),
        sampling_params=types_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        ignore_eos=True,
    )


async def test_each_turn_continues_what_was_said_and_finds_it_in_the_cache(mesh: Mesh) -> None:
    inputs = [list(range(1, 30)), [40, 41, 42], [50]]
    said: list[int] = []
    async with asyncio.timeout(SOON), ready_channel(mesh.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
        for token_ids in inputs:
            await call.write(turn(token_ids, 9))
        await call.done_writing()
        outputs: list[list[int]] = [[]]
        cached = []
        async for response in call:
            outputs[-1] += response.token_ids
            if response.finish_reason:
                cached.append(response.usage.cached_tokens)
                outputs.append([])
    for token_ids, output in zip(inputs, outputs, strict=False):
        said += token_ids
        assert output == mesh.expected(said, 9)
        said += output[:-1]
    assert cached[0] == 0
    assert cached[1] >= 28
    assert cached[2] > cached[1]


async def test_many_sessions_at_once_keep_their_own(mesh: Mesh) -> None:
    async def converse(seed: int) -> None:
        said: list[int] = []
        call = stub.GenerateSession()
        for number in range(4):
            token_ids = [seed, number + 1]
            await call.write(turn(token_ids, 3))
            output: list[int] = []
            while True:
                response = await call.read()
                assert isinstance(response, inference_pb2.GenerateResponse)
                output += response.token_ids
                if response.finish_reason:
                    break
            said += token_ids
            assert output == mesh.expected(said, 3)
            said += output[:-1]
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK

    async with asyncio.timeout(SOON), ready_channel(mesh.gateway.settings.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(converse(seed) for seed in range(1, 12)))


def answers(mesh: Mesh) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts with their outputs."""
    for first in range(1, 2000):
        yield [first, 7], mesh.expected([first, 7], MAX_TOKENS)


async def is_last_continued(mesh: Mesh, prompt: list[int], first: inference_pb2.GenerateRequest, reason: int) -> bool:
    """Whether a turn continues the last token of the first turn, which must end for this reason."""
    after = turn([50], 1)
    after.return_prompt_token_ids = True
    output: list[int] = []
    continued: list[int] = []
    async with asyncio.timeout(SOON), ready_channel(mesh.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
        await call.write(first)
        await call.write(after)
        await call.done_writing()
        reasons: list[int] = []
        async for response in call:
            continued += response.prompt_token_ids
            output += () if reasons else response.token_ids
            reasons += [response.finish_reason] if response.finish_reason else []
    assert reasons[0] == reason
    assert len(output) > 1
    is_continued = continued == [*prompt, *output, 50]
    assert is_continued or continued == [*prompt, *output[:-1], 50]
    return is_continued


@pytest.mark.parametrize("end", ["length", "eos", "stop token", "stop string", "repetition"])
async def test_the_last_token_of_a_turn_is_not_continued(mesh: Mesh, end: str) -> None:
    """However it ends: the KV of that token was never computed."""
    prompt, output = next(answers(mesh))
    request = turn(prompt, MAX_TOKENS)
    reason = types_pb2.FINISH_REASON_STOP
    if end == "length":
        reason = types_pb2.FINISH_REASON_LENGTH
    elif end == "eos":
        prompt = next(prompt for prompt, output in answers(mesh) if not EOS.isdisjoint(output[1:]))
        request = turn(prompt, MAX_TOKENS)
        request.ignore_eos = False
    elif end == "stop token":
        request.sampling_params.stop_token_ids.append(output[3])
    elif end == "stop string":
        request.stop.append(mesh.tokenizer.decode(output[:4])[-3:])
    else:
        reason = types_pb2.FINISH_REASON_REPETITION
        prompt = next(prompt for prompt, output in answers(mesh) if any(map(eq, output, output[1:])))
        request = turn(prompt, MAX_TOKENS)
        request.sampling_params.repetition_detection.CopyFrom(
            types_pb2.RepetitionDetection(min_pattern_size=1, max_pattern_size=1, min_count=2)
        )
    assert not await is_last_continued(mesh, prompt, request, reason)


@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_the_last_token_is_continued_only_if_a_grammar_ended_the_turn_without_a_stop_token(
    mesh: Mesh, ignore_eos: bool
) -> None:
    request = turn([7, 8], 30)
    request.ignore_eos = ignore_eos
    request.sampling_params.structured_outputs.regex = "[A-Z]{2}-[0-9]{3}"
    assert await is_last_continued(mesh, [7, 8], request, types_pb2.FINISH_REASON_STOP) is ignore_eos
