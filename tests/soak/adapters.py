"""``python -m tests.soak.adapters``: adapters are loaded, replaced, pinned and unloaded under load, and engines die.

The tokens of the hash worker depend on the digest of a request's adapter, so an answer by a wrong one shows.
"""

import argparse
import asyncio
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from tests.mesh.asking import ask
from tests.mesh.harness import MODEL, VOCAB_SIZE
from tests.mesh.split import SplitMesh
from tokenloom.engine_core.data.lora import CONFIG, WEIGHTS, read_adapter_files
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

NAMES = ("a", "b", "c")
ADMIN = {"Authorization": "Bearer admin"}
ENGINE = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3, "hash_step_seconds": 0.002}
HANG_SECONDS = 120.0
TYPED = ("model_not_found", "unavailable", "resource_exhausted")
"""Codes of errors for an adapter that is not there, and for what a client should send again."""


@dataclass(eq=False)
class _Watched:
    """A request that runs, and the versions that may answer it."""

    name: str
    digests: set[bytes]


class Adapters:
    """Writes two versions of each adapter, and knows which ones a request may be answered by.

    Attributes:
        paths: The directory of each version, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = {name: [directory / f"{name}{version}" for version in range(2)] for name in NAMES}
        self._digests = {path: _write(path) for paths in self.paths.values() for path in paths}
        self._loaded: dict[str, set[bytes]] = {name: set() for name in NAMES}
        self._watched: list[_Watched] = []

    def begin(self, name: str, path: Path) -> None:
        """From now on requests for the name may be answered by this version too."""
        self._loaded[name].add(self._digests[path])
        for watched in self._watched:
            if watched.name == name:
                watched.digests.add(self._digests[path])

    def end(self, name: str, path: Path | None) -> None:
        """From now on requests that begin are answered by this version only, or by none."""
        self._loaded[name] = set() if path is None else {self._digests[path]}

    @contextmanager
    def watch(self, name: str) -> Iterator[set[bytes]]:
        """Collect the versions that may answer a request that lasts as long as the ``with``."""
        watched = _Watched(name, set(self._loaded[name]))
        self._watched.append(watched)
        try:
            yield watched.digests
        finally:
            self._watched.remove(watched)


async def soak(directory: Path, seed: int, num_requests: int) -> Counter[str]:
    """Run one schedule; return how its requests and changes ended. Raises ``AssertionError`` for a wrong answer."""
    random, seen = Random(seed), Counter[str]()
    adapters = Adapters(directory)
    mesh = SplitMesh(directory, ("both", "both"), engine=ENGINE, gateway={"admin_api_key": "admin"})
    async with asyncio.timeout(HANG_SECONDS), mesh.running(), mesh.http() as http:
        async with asyncio.TaskGroup() as all_tasks:
            changes = all_tasks.create_task(_change(http, adapters, random, seen))
            all_tasks.create_task(_replace_an_engine(mesh, random.random()))
            async with asyncio.TaskGroup() as requests:
                for number in range(num_requests):
                    name = random.choice((*NAMES, ""))
                    requests.create_task(_request(http, adapters, name, [number, *random.randbytes(20)], seen))
                    await asyncio.sleep(random.expovariate(100.0))
            changes.cancel()
        await mesh.check_nothing_is_left()
    return seen


async def _change(http: httpx.AsyncClient, adapters: Adapters, random: Random, seen: Counter[str]) -> None:
    """Change adapters until cancelled."""
    while True:
        name, path = random.choice(NAMES), None
        match random.choice(("load", "load", "load", "pin", "unload")):
            case "load":
                path = random.choice(adapters.paths[name])
                adapters.begin(name, path)
                body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
                status = await _post(http, "load", body)
                if status == 200:
                    adapters.end(name, path)
            case "pin":
                status = await _post(http, "pin", {"lora_name": name, "pinned": random.random() < 0.5})
            case _:
                status = await _post(http, "unload", {"lora_name": name})
                if status == 200:
                    adapters.end(name, None)
        seen[f"change {status}"] += 1
        await asyncio.sleep(random.expovariate(20.0))


async def _post(http: httpx.AsyncClient, action: str, body: dict[str, Any]) -> int:
    return (await http.post(f"/v1/{action}_lora_adapter", json=body, headers=ADMIN)).status_code


async def _replace_an_engine(mesh: SplitMesh, delay: float) -> None:
    """Kill an engine while the mesh works, and add another one."""
    await asyncio.sleep(delay)
    await mesh.engines[0].kill()
    new = mesh.new_engine("both", **ENGINE)
    await new.start()
    await mesh.until_known(new.name)


async def _request(
    http: httpx.AsyncClient, adapters: Adapters, name: str, prompt: list[int], seen: Counter[str]
) -> None:
    """Ask for tokens and compare them with those of every version that may answer."""
    if not name:
        answer = await ask(http, prompt, 12)
        assert answer.token_ids == expected_tokens(prompt, 12, VOCAB_SIZE), f"base model: {answer}"
        seen["base model answered"] += 1
        return
    with adapters.watch(name) as allowed:
        answer = await ask(http, prompt, 12, model=f"{MODEL}:{name}")
    if answer.error is not None:
        assert answer.error["code"] in TYPED, answer
        seen[f"adapter {answer.error['code']}"] += 1
        return
    expected = [expected_tokens(prompt, 12, VOCAB_SIZE, digest) for digest in allowed]
    assert answer.token_ids in expected, f"{name} was answered by another adapter: {answer}"
    seen["adapter answered"] += 1


def _write(path: Path) -> bytes:
    """Write an adapter that the hash worker loads; return its digest."""
    path.mkdir()
    (path / CONFIG).write_text('{"r": 8, "peft_type": "LORA"}')
    (path / WEIGHTS).write_bytes(path.name.encode())
    return read_adapter_files(path).digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--requests", type=int, default=300, help="of each schedule")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the others follow")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    seen, started = Counter[str](), time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
            seen += asyncio.run(soak(Path(directory), seed, arguments.requests))
        print(f"schedule {seed}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{arguments.schedules} schedules: no answer by a wrong adapter, no hang")
    for what, count in sorted(seen.items()):
        print(f"{count:8} {what}")


if __name__ == "__main__":
    main()
