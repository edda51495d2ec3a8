"""Runs one engine: starts the tasks of its parts, asks at intervals whether its workers can compute, drains and ends
it, and publishes changes that peers see."""

import asyncio
import logging
from dataclasses import dataclass
from typing import NoReturn

from tokenloom.engine_core.data.errors import EngineDamagedError, EngineDeadError
from tokenloom.model_files.staged_weights import StagedWeights
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import (
    EngineDied,
    FailedPrecondition,
    TokenloomError,
    TryElsewhere,
    Unavailable,
    WeightsReplaced,
)
from tokenloom.services.runtime.host.health import Health
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import coordinator_pb2, engine_pb2, types_pb2

from .control.coordinator_link import CoordinatorLink
from .control.data_parallel import DataParallel
from .control.loras import Loras
from .control.pause import Pause
from .control.role import NAMES
from .core.core_link import CORE_DIED, CoreLink
from .kv.kv_front import KVFront
from .records.engine_settings import DrainMode
from .records.identity import Identity
from .records.load import LoadTracker
from .streams.engine_servicer import EngineServicer

log = logging.getLogger(__name__)

STOPPED = "The engine has stopped; retry the request."
DAMAGED = "damaged_weights"
"""The kind of the fall-back, and the first word of the log's lines about it."""
WRONG = "wrong_tokens"
"""The same of an engine whose tokens were not those of other engines."""
MOVE_SECONDS = 20.0
"""How long running requests may take to move away when the engine drains: they go on for some steps meanwhile."""
CLOSE_SECONDS = 1.0
"""How long peers may take to read the last frames when the engine ends."""


@dataclass(frozen=True)
class RunningEngine:
    """Joins the parts of an engine.

    Attributes:
        kv: None if the engine moves no KV.
        coordinator: None if the engine has no coordinator.
        group: None if the engine belongs to no data-parallel group.
        drain_mode: What happens to live attempts when the engine drains.
        staged: Keeps weights that trainers send; None: the engine takes none.
    """

    host: Host
    identity: Identity
    core: CoreLink
    load: LoadTracker
    streams: EngineServicer
    pause: Pause
    loras: Loras
    kv: KVFront | None
    coordinator: CoordinatorLink | None
    drain_mode: DrainMode = "finish"
    group: DataParallel | None = None
    staged: StagedWeights | None = None

    def spawn(self) -> "asyncio.Task[NoReturn]":
        """Start the tasks of all parts but the coordinator's link. The returned one runs the core's link and fails the
        host when the core dies."""
        self.host.spawn(self.core.run_aborts(), name="engine-aborts")
        if self.kv is not None:
            self.host.spawn(self.kv.run(), name="engine-kv")
        self.host.spawn(
            HealthCheck(self.core, self.load, self.host.health, self.host.fall_backs).run(), name="engine-health"
        )
        self.host.spawn(self._leave_wrong(), name="engine-quarantine")
        return self.host.spawn(self._run_core(), name="engine-core")

    async def drain(self) -> None:
        """Refuse new requests, and return when the live ones are answered and all leases have ended.

        In the mode ``migrate`` requests that run move to other engines with their KV. Output processors begin anew
        elsewhere what ends with TRY_ELSEWHERE: in that mode what cannot move, and all if the engine is paused, because
        nothing would end by itself then.
        """
        reason = "The engine is draining; retry the request."
        # New requests are refused and the state is published before anything is ended: what ends now is placed again at
        # once, and must not come back here.
        self._leave(reason, coordinator_pb2.ENGINE_STATE_DRAINING)
        is_paused = self.pause.leave()
        if self.drain_mode == "migrate" and not is_paused and self.kv is not None and self.kv.owner is not None:
            try:
                async with asyncio.timeout(MOVE_SECONDS):
                    await self.kv.moves.leave(TryElsewhere(reason))
            except TimeoutError:  # steps take long, or the core hangs
                log.warning("some requests have not moved within %g s and begin anew elsewhere", MOVE_SECONDS)
        if is_paused or self.drain_mode == "migrate":
            self.streams.fail_live(TryElsewhere(reason))
        await self.streams.idle()
        await self.leases_ended()

    async def resize_group(self, size: int) -> None:
        """Agree with the other ranks on the size of the data-parallel group. Raises as :meth:`DataParallel.resize`, and
        ``FailedPrecondition`` if the engine belongs to none."""
        if self.group is None:
            raise FailedPrecondition("the engine belongs to no data-parallel group; start it with --data-parallel-size")
        await self.group.resize(size, self._leave_group)

    async def _leave_group(self) -> None:
        reason = "The engine leaves its data-parallel group; retry the request."
        self._leave(reason, coordinator_pb2.ENGINE_STATE_DRAINING)
        self.pause.leave()
        self.streams.fail_live(TryElsewhere(reason))
        await self.streams.idle()
        await self.leases_ended()

    async def end_streams(self, error: TryElsewhere) -> None:
        """Answer all live and all new requests with ``error``, and end the streams."""
        self._leave(error.message, coordinator_pb2.ENGINE_STATE_DEAD)
        await self.streams.close(error, CLOSE_SECONDS)

    async def leases_ended(self) -> None:
        """Wait until no KV is held, or about to be held, for other engines."""
        if self.kv is not None:
            await self.kv.leases_ended()

    def publish_state(self, wanted: coordinator_pb2.DesiredState, progress: coordinator_pb2.StateProgress) -> None:
        """Report how far the engine is with the state that operators want."""
        self.identity.facts.desired.CopyFrom(wanted)
        del self.identity.facts.desired.engines[:]
        self.load.set_progress(progress)

    def publish_role(self, role: types_pb2.EngineRole) -> None:
        """Report which legs of requests the engine takes."""
        self.host.publish(role=NAMES[role])
        if self.coordinator is not None:
            self.coordinator.set_role(role)

    async def share_kv(self) -> None:
        """Let the core use KV blocks of engines with the same weights, and give them its own, if its settings say so.
        Until then, and while weights change, it shares none."""
        if self.identity.shares_kv:
            await self.core.call("share_kv", self.identity.kv)

    async def publish_weights(self, weights: bytes, path: str) -> None:
        """Report the fingerprint of new weights, and the checkpoint that has them: another process in this one's place
        loads it too. Streams are ended, because peers learn the fingerprint when they connect."""
        self.identity.fingerprint.weights = weights
        self.identity.facts.weights_path = path
        await self.share_kv()
        if self.coordinator is not None:
            self.coordinator.rejoin()
        # Requests that the core has frozen are to go on with the new weights. Any others have not begun here, or are
        # the rest of answers, which go on at an engine that has the old ones.
        keeps = self.pause.mode == engine_pb2.PAUSE_MODE_KEEP
        error = (WeightsReplaced if keeps else TryElsewhere)("the engine's weights were replaced; reconnect")
        await self.streams.close(error, CLOSE_SECONDS)

    async def _run_core(self) -> NoReturn:
        try:
            await self.core.run()
        except EngineDeadError as error:
            # A rank that was removed ends its core on purpose. Failing here would make its supervisor start it again.
            if self.group is not None and self.group.is_removed:
                log.info("the engine was removed from its data-parallel group; it waits to be stopped")
                await asyncio.Event().wait()
            if isinstance(error, EngineDamagedError):
                await self._leave_damaged(DAMAGED, str(error), "The engine's weights are damaged; retry the request.")
                raise Unavailable(f"{DAMAGED}: {error}") from None
            # A request that crashes engines must not be sent to all of them, so two deaths with no company end it. One
            # that was only computed together with others is not blamed, and in a group with waves the fault may lie
            # with a request of another rank.
            is_alone = self.core.num_requests == 1 and not self.core.ready.has_waves
            await self.end_streams(EngineDied(CORE_DIED) if is_alone else TryElsewhere(CORE_DIED))
            raise Unavailable(str(error)) from None

    async def _leave_wrong(self) -> NoReturn:
        """Leave service once a peer has found that the engine computes wrong tokens."""
        reason = await self.streams.quarantine
        await self._leave_damaged(WRONG, reason, "The engine has computed wrong tokens; retry the request.")
        raise Unavailable(f"{WRONG}: {reason}")

    async def _leave_damaged(self, kind: str, damage: str, message: str) -> None:
        """Give all requests to other engines, blaming none of them, and let the coordinator know why, which shows it
        when this process is gone. The next one reads the weights anew. ``message``: for the requests."""
        log.error("%s: %s; requests go on at other engines", kind, damage)
        self.host.fall_backs.begin(kind, damage)
        await self.end_streams(TryElsewhere(message))
        if self.coordinator is not None:
            await self.coordinator.reported(CLOSE_SECONDS)

    def _leave(self, reason: str, state: coordinator_pb2.EngineState) -> None:
        self.load.refuse_new(reason)
        if self.coordinator is not None:
            self.coordinator.set_state(state)


INTERVAL_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""How long the core may take to answer; it answers between steps, and a step of a large model takes seconds."""


class HealthCheck:
    """Sets the engine's health: gRPC health becomes NOT_SERVING and the coordinator places no requests while a check
    fails. Requests that the engine has accepted continue."""

    def __init__(self, core: CoreLink, load: LoadTracker, health: Health, fall_backs: FallBacks) -> None:
        """``fall_backs``: those of the engine; the core's are added."""
        self._core = core
        self._load = load
        self._health = health
        self._fall_backs = fall_backs

    async def run(self) -> NoReturn:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Ask the core once, and publish the answer if it has changed."""
        error = await self._ask()
        if bool(error) != self._load.is_failing:
            if error:
                log.error("the engine is not healthy and gets no requests: %s", error)
            else:
                log.info("the engine is healthy again")
            # Only new requests stay away: those that run may still end, and ending them would lose work for a passing
            # fault.
            self._load.set_failing(bool(error))
            await self._health.set_healthy(not error)

    def _show(self, fall_backs: object) -> None:
        """Show what the core does without since its start. ``fall_backs``: pairs of kind and detail."""
        for kind, detail in fall_backs if isinstance(fall_backs, list) else ():
            self._fall_backs.begin(kind, detail)

    async def _ask(self) -> str:
        """Return what is wrong; empty: nothing."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._core.call("check_health")
                self._show(await self._core.call("fall_backs"))
        except TimeoutError:
            return f"the core did not answer within {PATIENCE_SECONDS:g} s"
        except TokenloomError as error:
            return error.message
        return ""
