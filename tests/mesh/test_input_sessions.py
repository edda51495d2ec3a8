"""Sessions whose prompt goes on after it was answered, through all services."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    async with asyncio.timeout(SOON), open_channel(mesh.gateway.settings.listen) as channel:
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

    async with asyncio.timeout(SOON), open_channel(mesh.gateway.settings.listen) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(converse(seed) for seed in range(1, 12)))
