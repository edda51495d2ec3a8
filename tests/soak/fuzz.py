"""``python -m tests.soak.fuzz``: nonsense over HTTP and gRPC at a whole mesh, while requests of two tenants run.

The nonsense comes from both tenants. Each of them must get the tokens of its own prompts, and must not see that the
other one has sent a prompt before.
"""

import argparse
import asyncio
import logging
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
import httpx

from tests.mesh.harness import MODEL, VOCAB_SIZE, Mesh
from tests.ready_channel import ready_channel
from tests.soak.nonsense import Nonsense, nonsense, torn
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.kserve import grpc_service_pb2

AT_ONCE = 8
ANSWER_SECONDS = 30.0
"""What takes longer hangs."""
CANARY_TOKENS = 100
KEYS = ("sk-a", "sk-b")
"""Of two tenants."""
_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED})
"""What a call ends with when the fault is ours."""


async def fuzz(directory: Path, seeds: range) -> Counter[str]:
    """Raises what is wrong, with the seed. Returns how many answers of each kind came."""
    seen: Counter[str] = Counter()
    waiting = iter(seeds)

    async def some(mesh: Mesh, channel: grpc.aio.Channel) -> None:
        for seed in waiting:
            rng = random.Random(seed)
            key = KEYS[seed % 2]
            is_call = seed % 5 == 4
            seen[
                await (_call(channel, rng, key, seed) if is_call else _ask(mesh, nonsense(rng, MODEL, key), seed))
            ] += 1

    async with Mesh(directory, engine={"hash_step_seconds": 0.002}, gateway={"api_key": KEYS}).running() as mesh:
        async with ready_channel(mesh.gateway.settings.listen) as channel:
            neighbours = [_canaries(mesh, KEYS[0], [5, 6]), _canaries(mesh, KEYS[1], [7, 8]), _same_prompts(mesh, seen)]
            canaries = [asyncio.create_task(neighbour) for neighbour in neighbours]
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(AT_ONCE):
                        group.create_task(some(mesh, channel))
                for canary in canaries:
                    assert not canary.done(), canary.exception()
            finally:
                for canary in canaries:
                    canary.cancel()
                await asyncio.wait(canaries)
        await mesh.until_idle()
    return seen


async def _canaries(mesh: Mesh, key: str, prompt: list[int]) -> None:
    """Send one prompt of a tenant again and again."""
    async with mesh.http(headers=_header(key)) as http:
        while True:
            await _complete(mesh, http, prompt, CANARY_TOKENS)


async def _same_prompts(mesh: Mesh, seen: Counter[str]) -> None:
    """Send new prompts of four blocks with one tenant's key, and then with the other's: none is cached for both."""
    rng = random.Random(0)
    async with mesh.http(headers=_header(KEYS[0])) as first, mesh.http(headers=_header(KEYS[1])) as second:
        while True:
            prompt = [rng.randrange(5, VOCAB_SIZE) for _ in range(65)]
            for http in (first, second):
                assert await _complete(mesh, http, prompt, 2) == 0, "a tenant sees another one's prompt in the cache"
            seen["own prompts found"] += await _complete(mesh, second, prompt, 2) > 0


async def _complete(mesh: Mesh, http: httpx.AsyncClient, prompt: list[int], tokens: int) -> int:
    """Generate and check tokens. Returns how many of the prompt's were cached."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"][0]["token_ids"] == mesh.expected(prompt, tokens)
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


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
    # What a client sets a deadline for is refused where it cannot be promised, by 503 as other lacks of capacity.
    assert status < 500 or (status == 503 and b'"param":"ttft_deadline"' in answer), f"{where}: {answer!r}"
    assert b'"code":"internal"' not in answer, f"{where}: {answer!r}"
    return str(status)


async def _call(channel: grpc.aio.Channel, rng: random.Random, key: str, seed: int) -> str:
    """The status of a call whose message is torn."""
    method, message = rng.choice(_messages())
    call = channel.unary_stream(method) if method.endswith("Generate") else channel.unary_unary(method)
    data, metadata = torn(rng, message), (("authorization", f"Bearer {key}"),)
    try:
        if method.endswith("Generate"):
            async for _ in call(data, timeout=ANSWER_SECONDS, metadata=metadata):
                pass
        else:
            await call(data, timeout=ANSWER_SECONDS, metadata=metadata)
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
    print(
        f"{arguments.requests} requests, {seconds:.0f} s: none hung, failed by our fault, disturbed others or crossed"
    )
    print(", ".join(f"{count} {name}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    main()
