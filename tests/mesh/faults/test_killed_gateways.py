"""A gateway is killed while it streams: its clients continue through another one, and get every byte once."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.harness import MODEL, SOON, Mesh
from tests.plain_text import PLAIN_TEXT
from tests.ready_channel import ready_channel
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SLOW = {"hash_step_seconds": 0.05, "max_model_len": 512}
"""So slow that no answer ends before each has begun and the gateway is killed."""
PARAMETERS = {"type": "object", "properties": {"day": {"enum": ["Monday", "Tuesday"]}}, "required": ["day"]}
TOOL = {"type": "function", "function": {"name": "set_alarm", "parameters": PARAMETERS}}
MESSAGES = [{"role": "user", "content": "Wake me."}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 100, "ignore_eos": True, "seed": 3}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True, "seed": 4}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", TEXT),
    "echo": ("/v1/completions", TEXT | {"echo": True, "logprobs": 2}),
    "samples": ("/v1/completions", TEXT | {"n": 2, "return_token_ids": True}),
    "prompts": ("/v1/completions", TEXT | {"prompt": ["Once", "upon a time"], "stop": ["zq"]}),
    "chat": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
}


class Stream:
    """Reads the events of one answer, through several gateways if need be."""

    def __init__(self, path: str, fields: dict[str, Any]) -> None:
        self.path = path
        self.body = json.dumps({"model": MODEL, "stream": True, **fields}).encode()
        self.last_id = "0"
        self.events: list[dict[str, Any]] = []
        self.is_done = False
        self.begun = asyncio.Event()
        """Set with the third event."""

    async def read(self, http: httpx.AsyncClient) -> None:
        """Read to the end, or until the connection breaks."""
        headers = {"content-type": "application/json", "last-event-id": self.last_id}
        async with http.stream("POST", self.path, content=self.body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            block: dict[str, str] = {}
            async for line in response.aiter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    block[name] = value
                    continue
                if "data" in block:  # otherwise a comment, of a mesh that was silent for long
                    self._take(block)
                block = {}

    def _take(self, block: dict[str, str]) -> None:
        if block["data"] == "[DONE]":
            self.is_done = True
            return
        event = json.loads(block["data"])
        assert "error" not in event, event
        self.last_id = block["id"]
        self.events.append(event)
        if len(self.events) > 2:
            self.begun.set()

    def answer(self) -> dict[str, Any]:
        """Join what came, by choice."""
        assert self.is_done
        choices: dict[int, dict[str, Any]] = {}
        for event in self.events:
            for choice in event["choices"]:
                _join(choices.setdefault(choice["index"], {}), choice)
        usage = [event["usage"] for event in self.events if event.get("usage")]
        for each in usage:
            each["prompt_tokens_details"] = None  # what was cached depends on what ran before
        return {"choices": choices, "usage": usage}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the members of a piece: texts and lists grow, all others are given once or stay."""
    for name, value in part.items():
        if isinstance(value, dict):
            _join(whole.setdefault(name, {}), value)
        elif name == "tool_calls":
            calls = whole.setdefault(name, {})
            for call in value:
                call.pop("id", None)  # random
                _join(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, list):
            whole.setdefault(name, []).extend(value)
        elif isinstance(value, str) and name in ("text", "content", "arguments", "reasoning"):
            whole[name] = whole.get(name, "") + value
        elif value is not None:
            whole[name] = value


@asynccontextmanager
async def process(
    mesh: Mesh, directory: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    """A second gateway, in a process that can be killed. ``flags``: more of its flags."""
    settings = mesh.gateway.settings
    assert isinstance(settings, GatewaySettings)
    options = {
        "instance-id": "gateway-1",
        "listen": f"unix:{directory}/victim",
        "http-listen": f"unix:{directory}/victim.http",
        "metrics-listen": "",
        "tokenizers": ",".join(settings.tokenizers),
        "output-processors": ",".join(settings.output_processors),
        "coordinator": settings.coordinator,
    }
    command = [sys.executable, "-m", "tokenloom.services.gateway", *flags]
    for name, value in options.items():
        command += [f"--{name}", value]
    victim = await asyncio.create_subprocess_exec(*command)
    transport = httpx.AsyncHTTPTransport(uds=f"{directory}/victim.http", verify=PLAIN_TEXT)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=SOON) as http:
            async with asyncio.timeout(SOON):
                while not await _is_healthy(http):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield victim, http
    finally:
        if victim.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not noticed yet
                os.kill(victim.pid, signal.SIGKILL)
        await victim.wait()


async def _is_healthy(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


async def test_clients_of_a_killed_gateway_continue_through_another_one(socket_dir: Path) -> None:
    async with Mesh(socket_dir, output_processors=2, engine=SLOW).running() as mesh, mesh.http() as http:
        async with (
            process(mesh, socket_dir) as (victim, victims_http),
            open_channel(f"unix:{socket_dir}/victim") as old,
        ):
            streams = {name: Stream(*each) for name, each in STREAMS.items()}
            cut = [asyncio.create_task(each.read(victims_http)) for each in streams.values()]
            key = {"Idempotency-Key": "mine", "content-type": "application/json"}
            whole_body = json.dumps({"model": MODEL, **TEXT}).encode()
            whole = asyncio.create_task(victims_http.post("/v1/completions", content=whole_body, headers=key))
            call = GrpcAnswer()
            of_call = asyncio.create_task(call.generate(old))
            async with asyncio.timeout(SOON):
                await asyncio.gather(*(each.begun.wait() for each in streams.values()), call.begun.wait())
            os.kill(victim.pid, signal.SIGKILL)
            results = await asyncio.gather(*cut, whole, of_call, return_exceptions=True)
            assert all(isinstance(result, Exception) for result in results), results
        async with ready_channel(mesh.gateway.settings.listen) as channel:
            references = {name: Stream(*each) for name, each in STREAMS.items()}
            of_reference = GrpcAnswer()
            again = asyncio.create_task(http.post("/v1/completions", content=whole_body, headers=key))
            readers = [each.read(http) for each in (*streams.values(), *references.values())]
            await asyncio.gather(*readers, call.resume(channel), of_reference.generate(channel))
            repeated = await again
        for name, each in streams.items():
            assert each.answer() == references[name].answer(), name
            assert len({event["id"] for event in each.events}) == len({event["created"] for event in each.events}) == 1
        assert (call.text, call.token_ids) == (of_reference.text, of_reference.token_ids)
        assert repeated.json()["choices"][0]["text"] == references["text"].answer()["choices"][0]["text"]
        assert (await http.post("/v1/completions", content=whole_body, headers=key)).json()["id"] == repeated.json()[
            "id"
        ]
        await mesh.until_idle()


class GrpcAnswer:
    """An answer over gRPC, of two samples."""

    def __init__(self) -> None:
        params = types_pb2.SamplingParams(max_tokens=100, seed=5)
        self.request = inference_pb2.GenerateRequest(
            model=MODEL, text="Once", sampling_params=params, ignore_eos=True, n=2, resumable=True
        )
        self.text, self.token_ids = ["", ""], [list[int](), list[int]()]
        self.lengths, self.finished = [0, 0], [False, False]
        self.usage = inference_pb2.Usage()
        self.request_id = ""
        self.begun = asyncio.Event()

    async def generate(self, channel: Any) -> None:
        await self._read(inference_pb2_grpc.InferenceStub(channel).Generate(self.request))

    async def resume(self, channel: Any) -> None:
        positions = [
            inference_pb2.OutputPosition(
                index=index,
                num_tokens=len(self.token_ids[index]),
                text_length=self.lengths[index],
                finished=self.finished[index],
            )
            for index in range(2)
            if self.token_ids[index]
        ]
        request = inference_pb2.InferenceResumeRequest(
            request=self.request, request_id=self.request_id, positions=positions
        )
        await self._read(inference_pb2_grpc.InferenceStub(channel).Resume(request))
        assert self.usage.completion_tokens == 200
        assert self.finished == [True, True]

    async def _read(self, call: Any) -> None:
        async for response in call:
            index = response.index
            assert response.token_index == len(self.token_ids[index])
            self.request_id = response.request_id
            self.text[index] += response.text
            self.token_ids[index] += response.token_ids
            self.lengths[index] = response.text_length
            self.finished[index] = bool(response.finish_reason)
            self.usage = response.usage
            if len(self.token_ids[1]) > 4:
                self.begun.set()


async def test_a_request_whose_gateway_and_output_processor_are_lost(socket_dir: Path) -> None:
    async with Mesh(socket_dir, engine=SLOW).running() as mesh, mesh.http() as http:
        async with process(mesh, socket_dir) as (victim, victims_http):
            stream = Stream(*STREAMS["text"])
            cut = asyncio.create_task(stream.read(victims_http))
            async with asyncio.timeout(SOON):
                await stream.begun.wait()
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await cut
        (output_processor,) = mesh.output_processors
        await output_processor.kill()
        await output_processor.start()
        await mesh.until_missing()
        headers = {"content-type": "application/json", "last-event-id": stream.last_id}
        response = await http.post(stream.path, content=stream.body, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "request_lost")
