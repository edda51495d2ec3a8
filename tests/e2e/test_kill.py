"""Every part of a working mesh is killed with SIGKILL, one after the other, and the supervisor last.

The hash worker makes every answer predictable: what comes back is the right text or a typed error, never anything else.
"""

import asyncio
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import psutil
import pytest

TOKENS = 200
STEP_SECONDS = 0.01
ENDS_WITHIN = 30.0
"""Seconds after a death in which its requests have their error."""
SERVES_WITHIN = 120.0
"""Seconds after a death in which the mesh answers as before."""


@dataclass
class Outcome:
    """How a request ended: with text, or with an error."""

    text: str | None
    error: Exception | None
    ended: float


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Any:
    return serve("--worker", "hash", TOKENLOOM_HASH_STEP_SECONDS=str(STEP_SECONDS))


@pytest.fixture
async def client(mesh: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


async def complete(client: openai.AsyncOpenAI, on_first: Callable[[], object] = lambda: None) -> Outcome:
    """Streams one completion to its end, whichever that is."""
    text, pieces = "", 0
    try:
        stream = await client.completions.create(
            model="tokenloom-demo",
            prompt=list(range(100, 120)),
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with stream:
            async for chunk in stream:
                text += "".join(choice.text for choice in chunk.choices)
                pieces += 1
                if pieces == 1:
                    on_first()
    except (openai.APIError, httpx.TransportError) as error:
        return Outcome(None, error, time.monotonic())
    return Outcome(text, None, time.monotonic())


def is_typed(error: Exception, gateway_died: bool) -> bool:
    """503 with OpenAI's error body, or the same body inside the stream; a dead gateway can only reset its sockets."""
    if gateway_died:
        return isinstance(error, (httpx.TransportError, openai.APIConnectionError))
    if isinstance(error, openai.APIStatusError):
        return error.status_code == 503
    return isinstance(error, openai.APIError) and isinstance(error.body, dict) and bool(error.body.get("message"))


async def under_load(client: openai.AsyncOpenAI, requests: int, kill: Callable[[], float]) -> list[Outcome]:
    """Starts requests, kills when each has its first text, and returns how they ended."""
    streaming = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(complete(client, streaming.release)) for _ in range(requests)]
        for _ in tasks:
            await streaming.acquire()
        kill()
    return [task.result() for task in tasks]


def victim(mesh: Any, name: str) -> psutil.Process:
    if name == "engine core":
        engine: psutil.Process = mesh.part("engine")
        return next(child for child in engine.children() if "core_main" in " ".join(child.cmdline()))
    process: psutil.Process = mesh.part(name)
    return process


SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_helpers_cost_nothing(mesh: Any, client: openai.AsyncOpenAI, number: signal.Signals) -> None:
    """Processes that render chats and compile grammars, lost while they were idle, are no fault of a client."""

    async def chat(title: str) -> None:
        schema = {"name": "s", "schema": {**SCHEMA, "title": title}}  # which no engine has compiled before
        await client.chat.completions.create(
            model="tokenloom-demo",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": schema},  # type: ignore[typeddict-item]
        )

    await chat(f"first {number}")
    for service, module in (("tokenizer", "render_worker"), ("engine", "compiler_process")):
        helpers = [
            child for child in mesh.part(service).children(recursive=True) if module in " ".join(child.cmdline())
        ]
        assert helpers, mesh.log.read_text()
        for helper in helpers:
            helper.send_signal(number)
    await asyncio.gather(*(chat(f"{number} {index}") for index in range(4)))


@pytest.mark.parametrize("name", ["engine", "engine core", "output_processor", "tokenizer", "coordinator", "gateway"])
async def test_a_killed_part_costs_typed_errors_at_most(mesh: Any, client: openai.AsyncOpenAI, name: str) -> None:
    expected = (await complete(client)).text
    assert expected, mesh.log.read_text()
    killed_at = 0.0

    def kill() -> float:
        nonlocal killed_at
        killed_at = time.monotonic()
        process.send_signal(signal.SIGKILL)
        return killed_at

    process = victim(mesh, name)
    outcomes = await under_load(client, 8, kill)
    for outcome in outcomes:
        if outcome.error is None:
            assert outcome.text == expected
        else:
            assert is_typed(outcome.error, gateway_died=name == "gateway"), repr(outcome.error)
            assert outcome.ended - killed_at < ENDS_WITHIN
    lost = [outcome for outcome in outcomes if outcome.error is not None]
    assert bool(lost) == (name == "gateway"), "the loss of another part costs no request"

    async with asyncio.timeout(SERVES_WITHIN - (time.monotonic() - killed_at)):
        while (await complete(client)).text != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    async with asyncio.timeout(SERVES_WITHIN):
        while {part["health"] for part in await asyncio.to_thread(mesh.ps)} != {"SERVING"}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert victim(mesh, name).pid != process.pid


@pytest.mark.parametrize("name", ["engine", "tokenizer"])
async def test_requests_outlive_a_stopped_supervisor(mesh: Any, client: openai.AsyncOpenAI, name: str) -> None:
    """A part that is killed meanwhile is started again when the supervisor goes on."""
    expected = (await complete(client)).text
    assert expected, mesh.log.read_text()
    process = victim(mesh, name)
    mesh.process.send_signal(signal.SIGSTOP)
    try:
        assert (await complete(client)).text == expected
        process.send_signal(signal.SIGKILL)
    finally:
        mesh.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(SERVES_WITHIN):
        while victim_or_none(mesh, name) in (None, process):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await complete(client)).text == expected


def victim_or_none(mesh: Any, name: str) -> psutil.Process | None:
    try:
        return victim(mesh, name)
    except StopIteration:
        return None


def test_nothing_outlives_a_killed_supervisor(
    mesh: Any, remaining: Callable[[list[psutil.Process]], list[psutil.Process]]
) -> None:
    family = mesh.family()
    assert len(family) >= 7
    assert mesh.stop(signal.SIGKILL) == -signal.SIGKILL
    assert remaining(family) == []
    assert json.dumps(mesh.ps()) == "[]"
    host, _, port = mesh.url.partition("://")[2].rpartition(":")
    socket.create_server((host, int(port))).close()  # raises if a process listens
