"""The event loops of all parts are busy for 3 s, and one part is stopped: load is not death.

``make attack`` keeps each part busy for 5 s.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.mesh.harness import VOCAB_SIZE
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

HOOK = Path(__file__).parent / "part_hook"
BUSY_SECONDS = 3.0
"""Longer than the 2.5 s after which a stopped process counts as dead."""
BUSY_TOGETHER = (("gateway",), ("output_processor", "tokenizer"), ("engine",), ("coordinator",))
"""Parts that are connected are busy one after the other: a busy part would not see that the other one is silent."""
PROMPT = list(range(100, 120))
STREAMS = 2
TOKENS = 750
STEP_SECONDS = 0.02
NOTICED_WITHIN = 30.0
"""Seconds after which a stopped part counts as missing, on a loaded machine too."""


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Any:
    path = os.pathsep.join((str(HOOK), *filter(None, (os.environ.get("PYTHONPATH"),))))
    environment = {"TOKENLOOM_HASH_STEP_SECONDS": str(STEP_SECONDS), "TEST_BUSY_SECONDS": str(BUSY_SECONDS)}
    return serve("--worker", "hash", PYTHONPATH=path, **environment)


@pytest.fixture
async def client(mesh: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def stream(client: openai.AsyncOpenAI, on_first: Callable[[], object]) -> list[int]:
    """Return the tokens of one completion."""
    token_ids: list[int] = []
    chunks = await client.completions.create(
        model="tokenloom-demo",
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async with chunks:
        async for chunk in chunks:
            if not token_ids:
                on_first()
            for choice in chunk.choices:
                token_ids += choice.token_ids  # type: ignore[attr-defined]  # not OpenAI's
    return token_ids


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.timeout(300)
async def test_streams_survive_loops_that_are_busy(mesh: Any, client: openai.AsyncOpenAI) -> None:
    streaming = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(client, streaming.release)) for _ in range(STREAMS)]
        for _ in tasks:
            await streaming.acquire()
        for names in BUSY_TOGETHER:
            processes = [mesh.part(name) for name in names]
            before = [cpu_seconds(process) for process in processes]
            for process in processes:
                process.send_signal(signal.SIGUSR2)
            await asyncio.sleep(BUSY_SECONDS)
            for name, process, seconds in zip(names, processes, before, strict=True):
                assert cpu_seconds(process) > seconds + 0.5, f"the {name} was not busy"
        assert not any(task.done() for task in tasks), "the streams ended before the parts were busy"
    expected = expected_tokens(PROMPT, TOKENS, VOCAB_SIZE)
    assert [task.result() for task in tasks] == [expected] * STREAMS
    assert {part["health"] for part in await asyncio.to_thread(mesh.ps)} == {"SERVING"}


async def test_a_stopped_part_is_noticed_in_time(mesh: Any, client: openai.AsyncOpenAI) -> None:
    started = asyncio.Event()
    request = asyncio.create_task(stream(client, started.set))
    await started.wait()
    process = mesh.part("output_processor")
    stopped_at = time.monotonic()
    process.send_signal(signal.SIGSTOP)
    try:
        async with httpx.AsyncClient(base_url=mesh.url) as http:
            while (await http.get("/health")).json().get("missing") != ["output_processor"]:
                assert time.monotonic() - stopped_at < NOTICED_WITHIN
                await asyncio.sleep(0.05)
    finally:
        process.send_signal(signal.SIGCONT)
    assert await request == expected_tokens(PROMPT, TOKENS, VOCAB_SIZE), "it continues when the part is back"
