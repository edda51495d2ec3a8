"""The wall clock of a mesh, or of one of its parts, is set by 400 days while requests run: nothing changes for them."""

import asyncio
import json
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

DAYS = 400
SERVICES = ("engine", "coordinator", "gateway", "output_processor", "tokenizer")
BODY = {"model": "tokenloom-demo", "prompt": [*range(5, 105)], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


class Clock:
    """Sets the wall clock of the processes that were started with its environment."""

    def __init__(self, directory: Path) -> None:
        library = directory / "shifted_clock.so"
        source = Path(__file__).with_name("shifted_clock.c")
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self._file = directory / "shifts"
        with open(self._file, "wb") as file:
            file.truncate(8 << 22)  # a place for each process id that a kernel gives; sparse
        self.environment = {
            "LD_PRELOAD": str(library),
            "SHIFTED_CLOCK": str(self._file),
            "TOKENLOOM_HASH_STEP_SECONDS": "0.02",
        }

    def shift(self, days: int, pid: int = 0) -> None:
        """Add days to the time of a process; 0: of all processes."""
        with open(self._file, "r+b") as file:
            file.seek(8 * pid)
            file.write(struct.pack("<q", days * 86400))


@pytest.fixture
def clock() -> Iterator[Clock]:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    with tempfile.TemporaryDirectory(prefix="clock-", dir="/tmp") as directory:
        yield Clock(Path(directory))


async def first_text(http: httpx.AsyncClient, begun: asyncio.Event) -> str:
    """Stream an answer; ``begun`` is set at its first piece."""
    text = ""
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                begun.set()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def streamed(http: httpx.AsyncClient, clock: Clock, shifts: list[tuple[int, int]]) -> str:
    """Return a text during which the clock was set."""
    begun = asyncio.Event()
    answer = asyncio.create_task(first_text(http, begun))
    await asyncio.wait([answer, waiting := asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for days, pid in shifts:
        clock.shift(days, pid)
    return await answer


async def test_requests_do_not_see_that_the_wall_clock_is_set(serve: Any, clock: Clock, tmp_path: Path) -> None:
    mesh = serve("--worker", "hash", "--batch-dir", str(tmp_path / "batches"), **clock.environment)
    before = {process.pid for process in mesh.family()}
    async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as http:
        expected = (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {**BODY, "max_tokens": 600}}
        file = (
            await http.post("/v1/files", files={"file": ("in", json.dumps(line))}, data={"purpose": "batch"})
        ).json()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=fields)).json()["id"]
        async with asyncio.timeout(60):
            while (await http.get(f"/v1/batches/{batch}")).json()["status"] != "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        for days in (DAYS, -DAYS, 0):
            assert await streamed(http, clock, [(days, 0)]) == expected
        parts = {service: mesh.part(service).pid for service in SERVICES}
        for service, pid in parts.items():
            assert await streamed(http, clock, [(DAYS, pid)]) == expected, service
        assert await streamed(http, clock, [(-DAYS, pid) for pid in parts.values()]) == expected
        assert await streamed(http, clock, [(0, pid) for pid in parts.values()]) == expected

        async with asyncio.timeout(60):
            while (ended := (await http.get(f"/v1/batches/{batch}")).json())["status"] == "in_progress":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert ended["status"] in ("finalizing", "completed"), "its time is not over"
        assert ended["request_counts"]["completed"] == 1
    assert {process.pid for process in mesh.family()} == before
