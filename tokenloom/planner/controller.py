"""Looks at a running mesh, plans it and changes roles. It starts and stops no engines: what does so reads the plan."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import grpc.aio

from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.coordinator_pb2 import Snapshot, WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import SetRoleRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

from .demand import ROLES, EngineLoad, Goals
from .planner import Flip, Limits, Plan, Planner

LOOK_TIMEOUT_SECONDS = 5.0
_CONNECT_SECONDS = 1.0
"""A busy process may accept no connection in the 0.1 s that gRPC waits for one, so it gets several attempts."""
FLIP_TIMEOUT_SECONDS = 60.0
"""An engine that stops prefilling answers when the last engine has read its KV."""
_VALUES = {role: value for value, role in ROLES.items()}


class Controller:
    """Plans each model that a mesh serves. Where the mesh has certificates, that of the planner or the operator is
    needed."""

    def __init__(
        self,
        channels: Channels,
        coordinator: str,
        goals: Goals,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``coordinator``: its address."""
        self._channels = channels
        self._coordinator = coordinator
        self._goals, self._limits, self._clock = goals, limits, clock
        self._planners: dict[str, Planner] = {}

    async def plan(self) -> dict[str, Plan]:
        """Look once; return the plan for each model. Raises ``grpc.aio.AioRpcError`` or ``TimeoutError`` if the
        coordinator does not answer."""
        engines = _by_model(await self._snapshot())
        self._planners = {
            model: self._planners.get(model) or Planner(self._goals, self._limits) for model in sorted(engines)
        }
        now = self._clock()
        return {model: planner.plan(engines[model], now) for model, planner in self._planners.items()}

    async def apply(self, flips: Sequence[Flip]) -> list[str]:
        """Change the roles of engines, all at the same time. Returns what failed, in a sentence each: the next plan
        sees the engine as it is and tries again."""
        results = await asyncio.gather(*map(self._flip, flips))
        return [failure for failure in results if failure]

    async def _snapshot(self) -> Snapshot:
        async with (
            asyncio.timeout(LOOK_TIMEOUT_SECONDS),
            self._channels.open(self._coordinator, "coordinator") as channel,
        ):
            await _connect(channel)
            call = CoordinatorStub(channel).Watch(WatchRequest())
            try:
                snapshot = await call.read()
            finally:
                call.cancel()
        if not isinstance(snapshot, Snapshot):
            raise TimeoutError("the coordinator ended the stream of its registry")
        return snapshot

    async def _flip(self, flip: Flip) -> str:
        request = SetRoleRequest(role=_VALUES[flip.role])
        async with self._channels.open(flip.address, "engine") as channel:
            await _connect(channel)
            try:
                await EngineAdminStub(channel).SetRole(request, timeout=FLIP_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                return f"{flip.engine} did not become {flip.role}: {error.details()}"
        return ""


async def _connect(channel: grpc.aio.Channel) -> None:
    """Return when the channel is connected, or after :data:`_CONNECT_SECONDS`: the call that follows says why not."""
    # A live mesh whose queue grew showed it: with one attempt of 0.1 s a coordinator that was merely busy looked
    # absent.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_SECONDS):
            await channel.channel_ready()


def _by_model(snapshot: Snapshot) -> dict[str, list[EngineLoad]]:
    engines: defaultdict[str, list[EngineLoad]] = defaultdict(list)
    for entry in snapshot.engines:
        if (load := EngineLoad.of(entry)) is not None:
            engines[load.model].append(load)
    return engines
