"""``python -m tests.soak.bombs``: constraints that are meant to hurt, against a mesh of processes, beside a neighbour.

The neighbour streams one text after the other while each bomb is sent by itself, and, to another mesh, which has seen
none of them yet, while all are sent at once. A bomb must be answered within 2.5 s when it is alone, and no token of the
neighbour may come more than 100 ms late. Then the bombs' tenant sends 256 of them to a third mesh, once to abandon them
at once and once to wait for all: a grammar of the neighbour's tenant must be answered within 5 s in both cases. Times
are of this machine: run it where nothing else runs.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx

from benchmarks.mesh.local_mesh import http_url, with_mesh
from tests.mesh.answers.test_structured_outputs import BOMBS
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

STEP_SECONDS = 0.01
BOMBER, NEIGHBOUR = "bomber", "neighbour"
"""The tenants, and their keys."""
NUM_BOMBS = 256
MAX_GRAMMAR_SECONDS = 5.0
MAX_ANSWER_SECONDS = 2.5
MAX_LATE_SECONDS = 0.1
_STREAM_TOKENS = 200

Check = Callable[[httpx.AsyncClient, Sequence[dict[str, Any]]], Awaitable[list[str]]]


@dataclass
class Neighbour:
    """What an innocent stream saw."""

    late: float = 0.0
    """Seconds by which its latest token came after its step should have brought it."""
    num_tokens: int = 0
    _ends: bool = field(default=False, repr=False)

    async def read(self, http: httpx.AsyncClient) -> None:
        """Streams until told to end, at a stream's end."""
        body = {"max_tokens": _STREAM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._ends:
            last: float | None = None
            async with http.stream("POST", "/v1/completions", json=_completion(**body)) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        self.late = max(self.late, now - (last or now) - STEP_SECONDS)
                        self.num_tokens, last = self.num_tokens + 1, now
                    if self._ends:
                        break

    @asynccontextmanager
    async def beside(self, http: httpx.AsyncClient) -> AsyncIterator[None]:
        """Streams for as long as the block takes."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.read(http))
            while not self.num_tokens:  # noqa: ASYNC110  # of a stream that has not begun nothing can be late
                await asyncio.sleep(STEP_SECONDS)
            try:
                yield
            finally:
                self._ends = True


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": DEMO_MODEL_NAME, "prompt": "Once", **fields}


async def throw(http: httpx.AsyncClient, bomb: dict[str, Any], tenant: str = BOMBER) -> tuple[int, float]:
    """The status of a bomb's answer, and after how many seconds it came."""
    began = time.monotonic()
    body = _completion(structured_outputs=bomb, max_tokens=20)
    response = await http.post("/v1/completions", json=body, headers=_key(tenant))
    return response.status_code, time.monotonic() - began


async def one_by_one(http: httpx.AsyncClient, bombs: Sequence[dict[str, Any]]) -> list[str]:
    """Prints what happened; what should not have, in words."""
    wrong: list[str] = []
    for bomb in bombs:
        neighbour = Neighbour()
        async with neighbour.beside(http):
            status, seconds = await throw(http, bomb)
        wrong += _judge(str(bomb)[:44], neighbour, [(status, seconds)], MAX_ANSWER_SECONDS)
    return wrong


async def at_once(http: httpx.AsyncClient, bombs: Sequence[dict[str, Any]]) -> list[str]:
    """The same, of all of them; they wait for each other, for a compiler takes one at a time."""
    neighbour = Neighbour()
    async with neighbour.beside(http):
        answers = await asyncio.gather(*(throw(http, bomb) for bomb in bombs))
    return _judge("all at once", neighbour, answers, MAX_ANSWER_SECONDS * len(bombs))


async def many(http: httpx.AsyncClient, _: Sequence[dict[str, Any]]) -> list[str]:
    """Sends bombs that each take a compiler for a second or two, and meanwhile asks for a grammar of the neighbour."""
    wrong = []
    for name, first, is_abandoned in (("256 abandoned", 99_999_989, True), ("256 live", 89_999_989, False)):
        bombs = [
            asyncio.create_task(throw(http, {"json": {"type": "integer", "multipleOf": first - n}}))
            for n in range(NUM_BOMBS)
        ]
        await asyncio.sleep(2)
        if is_abandoned:
            for bomb in bombs:
                bomb.cancel()
        status, seconds = await throw(http, {"regex": "[0-9]{4}" + "x" * is_abandoned}, NEIGHBOUR)
        print(f"{name:<44} {status:>7} {seconds:4.2f} s for the grammar of another tenant")
        if status != 200 or seconds > MAX_GRAMMAR_SECONDS:
            wrong.append(f"{name}: the neighbour's grammar was answered with {status} after {seconds:.2f} s")
        for bomb in bombs:
            bomb.cancel()
        await asyncio.wait(bombs)
    return wrong


async def in_a_mesh(check: Check) -> list[str]:
    """What ``check`` finds wrong of a mesh of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "keys.toml"
        digests = {tenant: sha256(tenant.encode()).hexdigest() for tenant in (BOMBER, NEIGHBOUR)}
        file.write_text(
            "".join(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{key}"]\n' for name, key in digests.items())
        )
        return await _in_a_mesh(check, file)


async def _in_a_mesh(check: Check, key_file: Path) -> list[str]:
    engine = ("--worker", "hash", "--hash-step-seconds", str(STEP_SECONDS), "--max-waiting", "512")
    gateway = ("--api-key-file", str(key_file), "--cache-salt-secret", "s" * 16)
    limits = ("--tenant-pending-grammars", str(NUM_BOMBS), "--max-live-requests", str(2 * NUM_BOMBS + 2))
    flags = {"engine": engine, "gateway": (*gateway, *limits)}
    options = MeshOptions(DEMO_MODEL, DEMO_MODEL_NAME, port=0, flags=flags, common_flags=("--log-level", "error"))
    wrong: list[str] = []

    async def work(mesh: Mesh) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=http_url(mesh), timeout=60.0, headers=_key(NEIGHBOUR), limits=limits
        ) as http:
            calm = Neighbour()
            async with calm.beside(http):
                await throw(http, {"regex": "[ab]{3}"})  # the compilers are up from here on
                await asyncio.sleep(1)
            _judge("no bomb", calm, [], 0.0)
            wrong.extend(await check(http, BOMBS))

    await with_mesh(options, work)
    return wrong


def _key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def _judge(name: str, neighbour: Neighbour, answers: Sequence[tuple[int, float]], max_seconds: float) -> list[str]:
    slowest = max((seconds for _, seconds in answers), default=0.0)
    statuses = sorted({status for status, _ in answers})
    told = "/".join(map(str, statuses))
    print(
        f"{name:<44} {told:>7} {slowest:4.2f} s  neighbour at most {neighbour.late * 1e3:4.0f} ms late "
        f"({neighbour.num_tokens} tokens)"
    )
    wrong = []
    if not set(statuses) <= {200, 400}:
        wrong.append(f"{name}: answered with {told}")
    if slowest > max_seconds:
        wrong.append(f"{name}: answered after {slowest:.2f} s")
    if neighbour.late > MAX_LATE_SECONDS:
        wrong.append(f"{name}: the neighbour waited {neighbour.late * 1e3:.0f} ms")
    return wrong


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if wrong := [words for check in (one_by_one, at_once, many) for words in asyncio.run(in_a_mesh(check))]:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
