"""Workers in processes of their own: one that is killed is replaced, except where its KV moves between engines."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.mesh.harness import MAX_MODEL_LEN, MODEL, SOON, Mesh
from tests.mesh.split import SplitMesh

LONG: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}


@asynccontextmanager
async def engine(mesh: Mesh, name: str = "engine-0", *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tokenloom.services.engine", "--instance-id", name, "--log-level", "error"),
        *("--listen", mesh.address(name), "--coordinator", mesh.address("coordinator-0")),
        *("--worker", "hash", "--max-model-len", str(MAX_MODEL_LEN), "--num-kv-blocks", "512"),
        *("--metrics-listen", "", "--hash-step-seconds", "0.01", "--distributed-executor-backend", "mp"),
        *flags,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def workers_of(pid: int) -> Iterator[int]:
    """Yield the workers among all that this process, and its children, started."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # another one may end at this moment
            if any("worker_main" in argument for argument in child.cmdline()):
                yield child.pid


async def stream_lines(http: Any) -> list[str]:
    async with http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        return [line async for line in response.aiter_lines() if line]


async def test_requests_survive_a_killed_worker_and_a_second_one_soon_ends_its_engine(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=0)
    async with asyncio.timeout(2 * SOON), engine(mesh) as process, mesh.running(), mesh.http() as http:
        (worker,) = workers_of(process.pid)
        body = {**LONG, "return_token_ids": True}
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        streamed = asyncio.create_task(stream_lines(http))
        while await mesh.gauge("requests_running") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(worker, signal.SIGKILL)
        response, lines = await whole, await streamed
        assert response.json()["choices"][0]["token_ids"] == mesh.expected([1, 2, 3], 200)
        assert lines[-1] == "data: [DONE]"
        (other,) = workers_of(process.pid)
        assert other != worker
        await mesh.until_missing()
        os.kill(other, signal.SIGKILL)
        assert await process.wait() != 0, "the supervisor starts another"
        await mesh.until_missing("engine")


async def test_where_kv_moves_a_killed_worker_ends_its_engine_alone(socket_dir: Path) -> None:
    mesh = SplitMesh(socket_dir, ())
    kv = ("--kv-listen", mesh.address("engine-0-kv"))
    async with (
        asyncio.timeout(3 * SOON),
        engine(mesh, "engine-0", "--role", "prefill", *kv) as prefill,
        engine(mesh, "engine-1", "--role", "decode", "--kv-policy", "fail"),
        mesh.running(),
        mesh.http() as http,
    ):
        await mesh.until_known("engine-0", "engine-1")
        prompt = list(range(5, 105))
        request = {**LONG, "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
        answer = await http.post("/v1/completions", json=request)
        assert answer.json()["choices"][0]["token_ids"] == mesh.expected(prompt, 8)
        (worker,) = workers_of(prefill.pid)
        os.kill(worker, signal.SIGKILL)
        assert await prefill.wait() != 0, "the supervisor starts another"
        while "engine-0" in mesh.known():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        answer = await http.post("/v1/completions", json={**request, "prompt": prompt[1:]})
        assert answer.json()["choices"][0]["token_ids"] == mesh.expected(prompt[1:], 8)
