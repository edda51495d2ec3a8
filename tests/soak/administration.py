"""``python -m tests.soak.administration``: a process is killed during each call of an operator, at ten moments of it.

The calls are those that change a state which all engines shall be in: pause, sleep, weights, adapters; and the role of
one. Killed are the engines and the coordinator, in turns. An operator repeats a call that is not accepted. So many
seconds after the last process has joined again, all engines are in the state.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from tests.e2e.conftest import Served
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.coordinator_pb2 import EngineEntry, Snapshot, WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import SetRoleRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_DECODE, ENGINE_ROLE_PREFILL, EngineRole

WITHIN_SECONDS = 5.0
"""After the last process has joined again."""
PATIENCE_SECONDS = 120.0
"""Within so many seconds a call is accepted, and a process has joined again."""
MOMENTS = 10
NUM_PAIRS = 5
"""Of calls, of which the second one undoes the first one."""
VICTIMS = ("engine-0", "coordinator-0", "engine-1")
ENGINES = ("engine-0", "engine-1")
OPTIONS = (
    *("--worker", "hash", "--prefill", "1", "--decode", "1", "--enable-lora", "--log-level", "warning"),
    *("--admin-api-key", "root"),
)
_LOOK_SECONDS = 0.02


class Administered:
    """A mesh of processes, and what an operator sees of it."""

    def __init__(self, mesh: Served, http: httpx.AsyncClient) -> None:
        self._mesh = mesh
        self._http = http

    def part(self, name: str) -> Mapping[str, Any]:
        """Return what a part has written of its state. Raises ``OSError`` or ``ValueError`` while it has written
        none."""
        (folder,) = (self._mesh.log.parent / "tokenloom").glob("mesh-*")
        state: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return state

    async def post(self, path: str, **body: Any) -> None:
        """Make a call of the HTTP API until it is accepted."""
        await _until_true(partial(self._post, path, body), path)

    async def _post(self, path: str, body: Mapping[str, Any]) -> bool:
        answer = await self._http.post(path, json=body or None)
        assert answer.status_code in (200, 202) or answer.status_code >= 500, f"{path}: {answer.text}"
        return answer.is_success

    async def set_role(self, role: EngineRole) -> None:
        """Give the second engine a role, with as many calls as it takes."""

        async def ask() -> bool:
            async with open_channel(self.part(ENGINES[1])["address"]) as channel:
                await EngineAdminStub(channel).SetRole(SetRoleRequest(role=role), timeout=30)
            return True

        await _until_true(ask, "SetRole")

    async def snapshot(self) -> Snapshot:
        """Return what the coordinator knows."""
        async with open_channel(self.part("coordinator-0")["address"]) as channel:
            watch: Any = CoordinatorStub(channel).Watch(WatchRequest(), timeout=5)
            async for snapshot in watch:
                return snapshot  # type: ignore[no-any-return]
        raise OSError("the coordinator has ended")

    async def entries(self) -> dict[str, EngineEntry]:
        """Return the engines that the coordinator knows, by name."""
        return {entry.identity.engine_id: entry for entry in (await self.snapshot()).engines}

    async def are(self, path: str, value: bool) -> bool:
        """Return whether all engines say this of themselves."""
        answer = await self._http.get(path)
        return answer.is_success and answer.json()["engines"] == dict.fromkeys(ENGINES, value)

    async def all(self, is_so: Callable[[EngineEntry], bool]) -> bool:
        """Return whether the coordinator knows this of both engines."""
        entries = await self.entries()
        return len(entries) == len(ENGINES) and all(map(is_so, entries.values()))


@dataclass(frozen=True)
class Call:
    """What an operator does, and how the engines are then."""

    name: str
    make: Callable[[Administered], Awaitable[None]]
    is_reached: Callable[[Administered], Awaitable[bool]]


def calls(directory: Path) -> list[Call]:
    """Return the calls, each with the one that undoes it behind it. ``directory``: for another checkpoint."""
    other = shutil.copytree(DEMO_MODEL, directory / "other")
    with open(next(other.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    adapter = next(path for path in sorted(DEMO_ADAPTERS.iterdir()) if (path / "adapter_config.json").is_file())
    name = {"lora_name": "extra"}
    return [
        *_of_route("/pause?mode=keep", "/resume", "/is_paused"),
        *_of_route("/sleep?level=1", "/wake_up", "/is_sleeping"),
        Call("load adapter", _posting("/v1/load_lora_adapter", **name, lora_path=str(adapter)), _adapters(True)),
        Call("unload adapter", _posting("/v1/unload_lora_adapter", **name), _adapters(False)),
        *(Call(f"reload weights {path.name}", _posting(f"/reload_weights?path={path}"), _weights(path))
          for path in (other, DEMO_MODEL)),
        *(Call(f"set role {EngineRole.Name(role)}", lambda mesh, role=role: mesh.set_role(role), _role(role))
          for role in (ENGINE_ROLE_PREFILL, ENGINE_ROLE_DECODE)),
    ]  # fmt: skip


def _of_route(begin: str, end: str, shown: str) -> list[Call]:
    return [
        Call(path.partition("?")[0].strip("/"), _posting(path), lambda mesh, value=value: mesh.are(shown, value))
        for path, value in ((begin, True), (end, False))
    ]


def _posting(path: str, **body: str) -> Callable[[Administered], Awaitable[None]]:
    return lambda mesh: mesh.post(path, **body)


def _adapters(is_loaded: bool) -> Callable[[Administered], Awaitable[bool]]:
    return lambda mesh: mesh.all(lambda entry: ("extra" in {each.name for each in entry.report.adapters}) == is_loaded)


def _weights(path: Path) -> Callable[[Administered], Awaitable[bool]]:
    wanted = weights_fingerprint(path)
    return lambda mesh: mesh.all(lambda entry: entry.identity.fingerprint.weights == wanted)


def _role(role: EngineRole) -> Callable[[Administered], Awaitable[bool]]:
    async def has_role(mesh: Administered) -> bool:
        entries = await mesh.entries()
        return ENGINES[1] in entries and entries[ENGINES[1]].report.role == role

    return has_role


async def _until_true(is_so: Callable[[], Awaitable[bool]], what: str, seconds: float = PATIENCE_SECONDS) -> float:
    """Wait until something is so, whatever fails meanwhile, and return how long that took."""
    began = time.monotonic()
    while True:
        error: Exception | None = None
        try:
            if await is_so():
                return time.monotonic() - began
        except (OSError, ValueError, httpx.HTTPError, grpc.aio.AioRpcError) as caught:
            error = caught
        if time.monotonic() - began > seconds:
            raise AssertionError(f"{what}: not within {seconds:g} s ({error!r})")
        await asyncio.sleep(_LOOK_SECONDS)


async def disturbed(mesh: Administered, call: Call, seconds: float, victim: str) -> float:
    """Make a call, kill a process so many seconds after its begin, and return how long after the last process had
    joined again all engines were as the call says."""
    before, pid = await mesh.snapshot(), mesh.part(victim)["pid"]
    making = asyncio.ensure_future(call.make(mesh))
    await asyncio.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    await making

    async def has_joined() -> bool:
        now = await mesh.snapshot()
        epochs = [{each.identity.engine_id: each.identity.epoch for each in one.engines} for one in (before, now)]
        if victim.startswith("coordinator"):
            return before.coordinator_epoch != now.coordinator_epoch and len(epochs[1]) == len(ENGINES)
        return len(epochs[1]) == len(ENGINES) and epochs[0][victim] != epochs[1][victim]

    await _until_true(has_joined, f"{victim} joins again after {call.name}")
    return await _until_true(lambda: call.is_reached(mesh), f"{call.name} beside a killed {victim}")


async def try_calls(mesh: Administered, directory: Path, num_moments: int, pairs: Sequence[int]) -> bool:
    """Print a line for each call. Returns whether the engines were equal in time, each time."""
    kept = True
    found = calls(directory)
    for first in pairs:
        pair = found[2 * first : 2 * first + 2]
        lasts = []
        for call in pair:
            began = time.monotonic()
            await call.make(mesh)
            lasts.append(time.monotonic() - began)
            await _until_true(partial(call.is_reached, mesh), f"{call.name}, undisturbed")
        took: list[list[float]] = [[], []]
        for moment in range(num_moments):
            for number, call in enumerate(pair):
                after = lasts[number] * moment / max(num_moments - 1, 1)
                victim = VICTIMS[(moment + number) % len(VICTIMS)]
                took[number].append(await disturbed(mesh, call, after, victim))
        for call, last, seconds in zip(pair, lasts, took, strict=True):
            shown = f"equal {max(seconds):.2f} s after the last rejoin at most"
            print(f"{call.name:<32} {len(seconds)} kills within {last * 1e3:.0f} ms: {shown}", flush=True)
            kept &= max(seconds) <= WITHIN_SECONDS
    return kept


async def run(num_moments: int, pairs: Sequence[int] = range(NUM_PAIRS)) -> bool:
    """Serve a mesh and disturb its calls. Raises ``AssertionError`` for a state that is never reached.

    ``pairs``: of calls, in the order of :func:`calls`.
    """
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        (directory := Path(name) / "run").mkdir(mode=0o700)
        served = Served(directory, OPTIONS, {})
        try:
            assert served.url, served.log.read_text()
            headers = {"authorization": "Bearer root"}
            async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as http:
                return await try_calls(Administered(served, http), Path(name), num_moments, pairs)
        finally:
            if served.process.poll() is None:
                served.stop(signal.SIGINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=MOMENTS, help="of each call (%(default)s)")
    pairs = range(NUM_PAIRS)
    parser.add_argument("--pairs", type=int, nargs="+", choices=pairs, default=pairs, help="of calls, by number (all)")
    arguments = parser.parse_args()
    return 0 if asyncio.run(run(arguments.moments, arguments.pairs)) else 1


if __name__ == "__main__":
    sys.exit(main())
