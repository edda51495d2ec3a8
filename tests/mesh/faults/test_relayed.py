"""Clients behind a relay that do nothing for it go on when their gateway is killed, in calls beside ``Generate``."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.mesh.faults.test_resumed_everywhere import Inferred, infer, turn, two_gateways
from tests.mesh.harness import SOON, Mesh
from tests.services.relay.running_relay import count, running_relay
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2_grpc as kserve_pb2_grpc
from tokenloom.v1.vllm import vllm_engine_pb2 as vllm_pb2
from tokenloom.v1.vllm import vllm_engine_pb2_grpc

Kill = Callable[[], Awaitable[None]]


@asynccontextmanager
async def relayed(directory: Path) -> AsyncIterator[tuple[Mesh, Any, Kill, Host]]:
    """A mesh, a channel through a relay to a gateway that can be killed, and what kills it."""
    async with two_gateways(directory) as (mesh, _, kill), contextlib.AsyncExitStack() as opened:
        host = await opened.enter_async_context(
            running_relay(
                grpc_listen=f"unix:{directory}/relay",
                grpc_gateways=(f"unix:{directory}/victim", mesh.gateway.settings.listen),
                listen=f"unix:{directory}/own",
            )
        )
        channel = await opened.enter_async_context(open_channel(f"unix:{directory}/relay"))
        await opened.enter_async_context(asyncio.timeout(SOON))
        yield mesh, channel, kill, host


@pytest.mark.parametrize("where", ["within a turn", "between turns", "before a turn"])
async def test_a_session_goes_on(socket_dir: Path, where: str) -> None:
    inputs = [[5, 6, 7], [8, 9], [10, 11, 12]]
    async with relayed(socket_dir) as (mesh, channel, kill, host):
        call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
        said: list[int] = []
        is_killed = False
        for number, token_ids in enumerate(inputs):
            request = turn(token_ids)
            request.resumable = False
            if number == 1 and where == "between turns":
                await kill()
            await call.write(request)
            if number == 1 and where == "before a turn":
                await kill()
            tokens: list[int] = []
            while True:
                response = await call.read()
                assert response.token_index == len(tokens) or not response.token_ids
                tokens += response.token_ids
                if number == 1 and where == "within a turn" and len(tokens) >= 10 and not is_killed:
                    is_killed = True
                    await kill()
                if response.finish_reason:
                    break
            said += token_ids
            assert tokens == mesh.expected(said, 40)
            said += tokens[:-1]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert count(host, "continued_total") <= 1
        await mesh.until_idle()


async def test_a_stream_of_kserves_protocol_goes_on(socket_dir: Path) -> None:
    async with relayed(socket_dir) as (mesh, channel, kill, host):
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        found = [Inferred(), Inferred()]
        call, num_seen = stub.ModelStreamInfer(), 0
        for inferred in found:
            await call.write(infer())
            is_over = False
            while not is_over:
                part = await call.read()
                assert not part.error_message, part.error_message
                response = part.infer_response
                assert response.id == "a call of mine"
                assert "event_id" not in response.parameters
                inferred.add(response)
                num_seen += 1
                if num_seen == 15:
                    await kill()
                is_over = response.parameters["triton_final_response"].bool_param
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        first, second = found
        assert (first.texts, first.reasons, first.num_tokens) == (second.texts, second.reasons, second.num_tokens)
        assert (second.reasons, second.num_tokens) == (["length", "length"], 120)
        assert count(host, "continued_total") == 1
        await mesh.until_idle()


async def test_an_answer_of_kserves_protocol_is_made_once(socket_dir: Path) -> None:
    async with relayed(socket_dir) as (mesh, channel, kill, host):
        stub = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = infer()
        del request.inputs[1]
        asked = asyncio.ensure_future(stub.ModelInfer(request))
        await mesh.until_running()
        await kill()
        answer, reference = await asked, await stub.ModelInfer(request)
        assert answer.outputs == reference.outputs
        assert (answer.id, count(host, "continued_total")) == ("a call of mine", 1)
        await mesh.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_vllms_contract_goes_on(socket_dir: Path, stream: bool) -> None:
    params = vllm_pb2.SamplingParams(max_tokens=60, seed=4, temperature=1.0, ignore_eos=True, n=2, logprobs=1)
    request = vllm_pb2.GenerateRequest(
        request_id="mine", tokenized=vllm_pb2.TokenizedInput(input_ids=[5, 6, 7]), sampling_params=params, stream=stream
    )
    async with relayed(socket_dir) as (mesh, channel, kill, host):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        answers: list[tuple[Any, ...]] = []
        for is_cut in (True, False):
            chunks: list[list[int]] = [[], []]
            logprobs: list[list[float]] = [[], []]
            complete: dict[int, list[int]] = {}
            call = stub.Generate(request)
            if is_cut and not stream:
                await mesh.until_running()
                await kill()
            async for response in call:
                if response.WhichOneof("response") == "complete":
                    assert response.complete.index not in complete
                    complete[response.complete.index] = list(response.complete.output_ids)
                    continue
                chunk = response.chunk
                chunks[chunk.index] += chunk.token_ids
                logprobs[chunk.index] += chunk.output_logprobs.token_logprobs
                assert len(chunks[chunk.index]) == chunk.completion_tokens
                if is_cut and sum(map(len, chunks)) in (20, 21) and not count(host, "continued_total"):
                    await kill()
            answers.append((chunks, logprobs, complete))
        assert answers[0] == answers[1]
        assert {index: len(ids) for index, ids in answers[0][2].items()} == {0: 60, 1: 60}
        assert count(host, "continued_total") == 1
        await mesh.until_idle()
