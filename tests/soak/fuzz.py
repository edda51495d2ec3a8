"""``python -m tests.soak.fuzz``: nonsense over HTTP and gRPC at a whole mesh, beside requests that must not notice."""

import argparse
import asyncio
import logging
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc

from tests.mesh.harness import MODEL, Mesh
from tests.soak.nonsense import Nonsense, nonsense, torn
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2

AT_ONCE = 8
ANSWER_SECONDS = 30.0
"""What takes longer hangs."""
CANARY_TOKENS = 100
_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED})
"""What a call ends with when the fault is ours."""


async def fuzz(directory: Path, seeds: range) -> Counter[str]:
    """Raises what is wrong, with the seed. Returns how many answers of each kind came."""
    seen: Counter[str] = Counter()
    waiting = iter(seeds)

    async def some(mesh: Mesh, channel: grpc.aio.Channel) -> None:
        for seed in waiting:
            rng = random.Random(seed)
            seen[await (_call(channel, rng, seed) if seed % 5 == 4 else _ask(mesh, nonsense(rng, MODEL), seed))] += 1

    async with Mesh(directory, engine={"hash_step_seconds": 0.002}).running() as mesh:
        async with open_channel(mesh.gateway.settings.listen) as channel:
            canaries = asyncio.create_task(_canaries(mesh))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(AT_ONCE):
                        group.create_task(some(mesh, channel))
                assert not canaries.done(), canaries.exception()
            finally:
                canaries.cancel()
                await asyncio.wait([canaries])
        await mesh.until_idle()
    return seen


async def _canaries(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": CANARY_TOKENS, "ignore_eos": True, "return_token_ids": True}
    expected = mesh.expected([5, 6], CANARY_TOKENS)
    async with mesh.http() as http:
        while True:
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == expected


async def _ask(mesh: Mesh, request: Nonsense, seed: int) -> str:
    """The answer's status, or that the connection was closed."""
    where = f"seed {seed}: {request.data[:2000]!r}"
    host, _, port = mesh.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            writer.write(request.data)
            if request.half_closed:
                writer.write_eof()
            answer = await reader.read()
    except TimeoutError:
        raise AssertionError(f"no answer: {where}") from None
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    if not answer:
        assert request.may_be_dropped, f"no answer: {where}"
        return "dropped"
    status = int(answer.split()[1])
    assert status < 500, f"{where}: {answer!r}"
    assert b'"code":"internal"' not in answer, f"{where}: {answer!r}"
    return str(status)


async def _call(channel: grpc.aio.Channel, rng: random.Random, seed: int) -> str:
    """The status of a call whose message is torn."""
    method, message = rng.choice(_messages())
    call = channel.unary_stream(method) if method.endswith("Generate") else channel.unary_unary(method)
    data = torn(rng, message)
    try:
        if method.endswith("Generate"):
            async for _ in call(data, timeout=ANSWER_SECONDS):
                pass
        else:
            await call(data, timeout=ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _OURS:
            raise AssertionError(f"seed {seed}: {method} {data!r}") from error
        return str(error.code().name)
    return "OK"


def _messages() -> list[tuple[str, bytes]]:
    """Methods and good messages."""
    params = types_pb2.SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=[1], logit_bias={3: 0.5}, seed=7)
    generate = inference_pb2.GenerateRequest(model=MODEL, text="Once upon", sampling_params=params, stop=["x"])
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    infer = grpc_service_pb2.ModelInferRequest(model_name=MODEL, id="7")
    infer.parameters["max_tokens"].int64_param = 3
    tensor = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"Once upon")
    return [
        ("/tokenloom.v1.Inference/Generate", generate.SerializeToString()),
        (
            "/tokenloom.v1.Inference/Generate",
            inference_pb2.GenerateRequest(model=MODEL, chat=chat, sampling_params=params).SerializeToString(),
        ),
        ("/tokenloom.v1.Inference/ListModels", b"\n\x01a"),
        ("/inference.GRPCInferenceService/ModelInfer", infer.SerializeToString()),
        ("/inference.GRPCInferenceService/ModelMetadata", b"\n\x01a"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # what is ignored is told
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        seen = asyncio.run(fuzz(Path(directory), range(arguments.seed, arguments.seed + arguments.requests)))
    seconds = time.monotonic() - started
    print(f"{arguments.requests} requests, {seconds:.0f} s: none hung, none failed by our fault, none disturbed others")
    print(", ".join(f"{count} {name}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main()
