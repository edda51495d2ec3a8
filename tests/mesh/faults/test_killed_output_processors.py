"""Output processors as processes of their own: signals end them under load, and no client notices."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 30, "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STEP = {"hash_step_seconds": 0.02}
BASE: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "seed": 7}
REQUESTS: dict[str, dict[str, Any]] = {
    "samples with log probabilities": {"n": 2, "logprobs": 2, "prompt_logprobs": 1},
    "several prompts": {"prompt": [[1, 2, 3], [4, 5, 6]]},
    "penalties": {"repetition_penalty": 1.3, "min_tokens": 5, "temperature": 0.8},
    "large pieces": {"stream_interval": 7},
    "beam search": {"n": 2, "use_beam_search": True, "max_tokens": 20, "stream": False},
    "JSON": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False, "max_tokens": 150},
}


class Process:
    """An output processor that a test may signal and start again."""

    def __init__(self, mesh: Mesh, name: str, *flags: str) -> None:
        addresses = {"listen": mesh.address(name), "coordinator": mesh.address("coordinator-0")}
        self._command = (
            *(sys.executable, "-m", "tokenloom.services.output_processor", "--instance-id", name, *flags),
            *("--metrics-listen", "", "--log-level", "error", "--drain-timeout", "0.2"),
            *(part for flag, to in addresses.items() for part in (f"--{flag}", to)),
        )
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._command)

    async def end(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)


class Outside(Mesh):
    """A mesh whose output processors are processes."""

    def __init__(self, directory: Path, *flags: str) -> None:
        super().__init__(directory, output_processors=2, engine=STEP)
        self.processes = [Process(self, part.settings.instance_id, *flags) for part in self.output_processors]

    @property
    def parts_here(self) -> list[Any]:
        return [self.coordinator, *self.tokenizers, *self.engines]


@pytest.fixture
def flags() -> tuple[str, ...]:
    return ()


@pytest.fixture
async def outside(socket_dir: Path, flags: tuple[str, ...]) -> AsyncIterator[Outside]:
    mesh = Outside(socket_dir, *flags)
    try:
        await asyncio.gather(*(part.start() for part in [*mesh.parts_here, *mesh.processes]))
        async with asyncio.timeout(SOON):
            await mesh.gateway.start()
            await until_connected(mesh)
        yield mesh
    finally:
        await mesh.gateway.stop()
        await asyncio.gather(*(part.stop() for part in mesh.parts_here), *(each.close() for each in mesh.processes))


async def until_connected(mesh: Outside) -> None:
    """The gateway may send new requests to both."""
    async with asyncio.timeout(SOON), mesh.http() as http:
        while (await http.get("/health")).json()["parts"]["output_processor"]["serving"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def streamed(http: httpx.AsyncClient, fields: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What came for each output, joined."""
    body = {**BASE, "stream": True, "return_token_ids": True, **fields}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        data = (await response.aread()).decode()
    if not body["stream"]:
        return {choice["index"]: choice for choice in json.loads(data)["choices"]}
    outputs: dict[int, dict[str, Any]] = {}
    for line in data.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                output = outputs.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": [], "prompt": []})
                output["text"] += choice["text"]
                output["ids"] += choice.get("token_ids") or []
                output["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                output["prompt"] += choice.get("prompt_logprobs") or []
                output["reason"] = choice["finish_reason"], choice.get("stop_reason")
    return outputs


async def called(mesh: Mesh) -> dict[int, tuple[str, list[int], int]]:
    """Two samples over gRPC."""
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        text="Once",
        n=2,
        sampling_params=types_pb2.SamplingParams(max_tokens=60, seed=3),
        ignore_eos=True,
    )
    outputs: dict[int, tuple[str, list[int], int]] = {}
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        async for part in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            text, ids, _ = outputs.get(part.index, ("", [], 0))
            assert part.token_index == len(ids)
            outputs[part.index] = (text + part.text, [*ids, *part.token_ids], part.finish_reason)
    return outputs


async def conversed(mesh: Mesh) -> list[tuple[str, list[int]]]:
    """The turns of one session."""
    turns: list[tuple[str, list[int]]] = []
    params = types_pb2.SamplingParams(max_tokens=20, temperature=0.0)
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).GenerateSession()
        for text in ("Once", " upon", " a time"):
            request = inference_pb2.GenerateRequest(model=MODEL, text=text, sampling_params=params, ignore_eos=True)
            await call.write(request)
        await call.done_writing()
        text, ids = "", list[int]()
        async for part in call:
            text, ids = text + part.text, [*ids, *part.token_ids]
            if part.finish_reason:
                turns.append((text, ids))
                text, ids = "", []
    return turns


async def everything(mesh: Mesh, http: httpx.AsyncClient, stop: str) -> list[Any]:
    stopped = {"stop": [stop], "include_stop_str_in_output": False}
    bodies = [*REQUESTS.values(), stopped, {**stopped, "include_stop_str_in_output": True, "n": 2}]
    return list(await asyncio.gather(called(mesh), conversed(mesh), *(streamed(http, body) for body in bodies)))


@pytest.mark.parametrize(
    ("number", "flags", "least_moved"),  # how many finish instead of moving is a matter of time
    [(signal.SIGKILL, (), 1), (signal.SIGTERM, (), 0), (signal.SIGTERM, ("--drain", "migrate"), 1)],
    ids=["killed", "drained", "migrated"],
)
async def test_no_request_notices_that_its_output_processor_went(
    outside: Outside, number: int, least_moved: int
) -> None:
    async with asyncio.timeout(3 * SOON), outside.http() as http:
        text = (await streamed(http, {}))[0]["text"]
        stop = text[len(text) * 3 // 4 :][:6]  # it straddles several tokens
        undisturbed = await everything(outside, http, stop)
        work = asyncio.create_task(everything(outside, http, stop))
        await outside.until_running(8)
        for process in outside.processes:
            await process.end(number)
            await process.start()
            await until_connected(outside)
        assert await work == undisturbed
        moved = re.search(r"^tokenloom_gateway_requests_moved_total (\S+)", (await http.get("/metrics")).text, re.M)
        assert moved is not None
        assert float(moved[1]) >= least_moved, "the signals hit requests that had begun"
        await outside.until_idle()
