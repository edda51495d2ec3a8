"""The engine service: starts a core and its front, joins the coordinator and obeys it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import grpc.aio

from tokenloom.engine_core.client.async_core_client import AsyncCoreClient, AsyncMPClient
from tokenloom.engine_core.data.kv_events import KVCacheEvent
from tokenloom.model_files import model_path
from tokenloom.model_files.staged_weights import StagedWeights
from tokenloom.process.standby import take_waiting_child
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, TryElsewhere
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import coordinator_pb2, engine_pb2_grpc

from .control.coordinator_link import CoordinatorLink
from .control.data_parallel import DataParallel
from .control.loras import Loras
from .control.pause import Pause
from .control.role import BY_NAME
from .control.state_follower import StateFollower
from .core.core_link import CoreLink
from .core.core_start import CoreWatchdog, process_client, start_core
from .engine_admin import Administration, EngineAdminServicer
from .kv.kv_front import KVFront
from .records.engine_settings import EngineSettings, KVEventsConfig
from .records.identity import Identity, make_fingerprint, weights_stamps
from .records.load import LoadTracker
from .records.stat_log import StatIntervals, StatLine, StatLogger, plugged_loggers
from .running_engine import STOPPED, RunningEngine
from .streams.engine_servicer import EngineServicer

log = logging.getLogger(__name__)


class EngineService:
    """Serves one engine. Its front runs in this process; the core runs in another, unless a ``client`` is given."""

    def __init__(self, settings: EngineSettings, client: AsyncCoreClient | None = None) -> None:
        self._settings = settings
        self._client = client
        self._undo = contextlib.AsyncExitStack()
        self._drain: Callable[[], Awaitable[None]] = _nothing

    async def start(self, host: Host) -> RunningEngine:
        """Start the core, serve, and return when the engine has joined its coordinator, if it has one.

        Raises ``InvalidArgument`` for a wrong model or setting, ``FailedPrecondition`` for another failure of the core.
        """
        engine = await _start(self._settings, self._client, host, self._undo)
        self._drain = engine.drain
        if engine.coordinator is not None:
            log.info("waiting for the coordinator")
            await engine.coordinator.joined.wait()
        if engine.group is not None:
            await engine.group.wait_member()
        return engine

    async def drain(self) -> None:
        """Refuse new requests, and return when the live ones are answered and all leases have ended."""
        await self._drain()

    async def stop(self) -> None:
        """Answer live requests with TRY_ELSEWHERE and end the core. Idempotent."""
        await self._undo.aclose()


def _loggers(settings: EngineSettings) -> list[StatLogger]:
    """Return what gets the engine's statistics. Raises ``InvalidArgument`` for a plugin that cannot be loaded."""
    lines = [] if settings.disable_log_stats else [StatLine(settings.instance_id.removeprefix("engine-"))]
    try:
        return [*lines, *plugged_loggers(settings.plugins)]
    except ValueError as error:
        raise InvalidArgument(f"plugins: {error}", "plugins") from error


async def _start(
    settings: EngineSettings, client: AsyncCoreClient | None, host: Host, undo: contextlib.AsyncExitStack
) -> RunningEngine:
    needs_weights = settings.engine.worker.load_format == "auto"
    path = await asyncio.to_thread(model_path.resolve, settings.engine.worker.model, weights=needs_weights)
    name = settings.served_model_name or model_path.served_name(path, settings.engine.worker.model)
    load = LoadTracker(settings.engine.scheduler.max_num_seqs, settings.max_waiting, host.clock.seconds)
    # The core is a command of its own, not a fork: a fork with a live gRPC runtime hangs, and multiprocessing would
    # need a __main__ guard in the scripts of users.
    try:
        client = client or (_remote_client if settings.remote_vllm else process_client)(settings, str(path))
    except ValueError as error:  # of an option that does not fit the checkpoint
        raise InvalidArgument(str(error)) from error
    if not isinstance(client, AsyncMPClient) and (child := take_waiting_child()) is not None:
        await asyncio.to_thread(child.discard)  # there is no core that it could become
    # The stack undoes in reverse: streams end first, then the KV port, and the core last, since both still talk to it.
    undo.push_async_callback(client.close)
    stamps = await asyncio.to_thread(weights_stamps, path, settings.engine.worker)
    loggers = _loggers(settings)  # made before the weights load, as what follows
    staged = None
    if settings.staged_weights_dir:
        staged = await asyncio.to_thread(StagedWeights, Path(settings.staged_weights_dir), path)
        undo.callback(staged.close)
    publish = None  # made before the weights load, so that a wrong address costs no time
    if settings.kv_events_config is not None and settings.kv_events_config.is_on:
        publish = _publish_events(settings.kv_events_config, settings, host, undo)
    core = await start_core(settings, client, load, host, name)
    if core.kv_events is not None:
        core.kv_events.outlet = publish
    if core.rows is not None:
        undo.push_async_callback(core.rows.close)
    fingerprint = await asyncio.to_thread(make_fingerprint, path, name, core.ready, settings.engine)
    if await asyncio.to_thread(weights_stamps, path, settings.engine.worker) != stamps:  # which did the core load?
        raise FailedPrecondition(f"the files of {path} changed while they were loaded; start the engine again")
    host.publish(max_model_len=core.ready.max_model_len)
    to_coordinator = host.channels.open(settings.coordinator, "coordinator") if settings.coordinator else None
    if to_coordinator is not None:
        host.spawn(_hold(to_coordinator), name="engine-coordinator-channel")
    kv = KVFront(settings, core, load, host, to_coordinator, fingerprint) if settings.kv_transports else None
    if kv is not None:
        undo.push_async_callback(kv.close)
    if settings.move_before_preemption:
        load.watch_blocks(core.ready.block_size)
    address = settings.advertise_address or host.address
    kv_address = kv.address if kv is not None else ""
    weight_bytes = sum(size for _, size, *_ in stamps)
    identity = Identity(settings, core.ready, fingerprint, host.epoch, address, kv_address, weight_bytes)
    streams = EngineServicer(identity, core, load, kv, host.random, frame_interval=settings.frame_interval)
    role = BY_NAME[settings.engine.kv.role]
    coordinator = None
    if to_coordinator is not None:
        coordinator = CoordinatorLink(to_coordinator, identity, load, role, host.fall_backs)
    pause, loras = Pause(core, load), Loras(core, load, are_enabled=settings.engine.lora.enable)
    group = _group(settings, core, load)
    engine = RunningEngine(
        host, identity, core, load, streams, pause, loras, kv, coordinator, settings.drain, group, staged
    )
    identity.facts.start_role = role
    administration = Administration(engine, role)
    undo.push_async_callback(engine.end_streams, TryElsewhere(STOPPED))
    host.add_servicer(engine_pb2_grpc.add_EngineServicer_to_server, engine.streams)
    host.add_servicer(engine_pb2_grpc.add_EngineAdminServicer_to_server, EngineAdminServicer(engine, administration))
    if loggers:
        intervals = StatIntervals(loggers, settings.log_stats_interval, host.clock.seconds)
        counted = core.metrics.generation_tokens
        host.spawn(intervals.run(lambda: (core.metrics.stats, counted.value)), name="engine-stats")
    if isinstance(client, AsyncMPClient):
        host.spawn(CoreWatchdog(client).run(), name="engine-core-watch")
    if coordinator is not None:
        follower = StateFollower(administration, engine.publish_state, coordinator.joined.set, host.fall_backs)
        host.spawn(follower.run(), name="engine-state")
        host.spawn(coordinator.run(CoordinatorCommands(engine, follower)), name="engine-coordinator")
    undo.callback(engine.spawn().cancel)  # undone first: the end of the core is no failure then
    await engine.share_kv()
    return engine


def _remote_client(settings: EngineSettings, checkpoint: str) -> AsyncCoreClient:
    """Return what stands for a core where a server of others computes. Raises ``ValueError`` for a file that cannot be
    read."""
    from .core.vllm_core import remote_core  # here: most engines compute by themselves

    return remote_core(settings, checkpoint)


def _publish_events(
    config: KVEventsConfig, settings: EngineSettings, host: Host, undo: contextlib.AsyncExitStack
) -> Callable[[Sequence[KVCacheEvent]], None]:
    """Return what publishes the events of a step for routers of others. Raises ``InvalidArgument``."""
    from .records.kv_event_publisher import KVEventPublisher  # here: most engines publish none

    parallel = settings.engine.parallel
    publisher = KVEventPublisher(config, parallel.data_parallel_rank if parallel.group_id else 0, time.time)
    undo.callback(publisher.close)
    if publisher.replay_endpoint:
        undo.callback(host.spawn(publisher.run(), name="replay of KV events").cancel)
    host.publish(kv_events=publisher.endpoint, kv_events_replay=publisher.replay_endpoint)
    log.info("KV events at %s", publisher.endpoint)
    return publisher.publish


def _group(settings: EngineSettings, core: CoreLink, load: LoadTracker) -> DataParallel | None:
    parallel = settings.engine.parallel
    if not parallel.group_id:
        return None
    return DataParallel(core, load, parallel.data_parallel_rank, parallel.data_parallel_size)


async def _hold(channel: grpc.aio.Channel) -> NoReturn:
    """Close the channel when the tasks that use it are cancelled too."""
    async with channel:
        await asyncio.Event().wait()
    raise AssertionError("nothing sets the event")


async def _nothing() -> None:
    """Drain an engine that was not started."""


class CoordinatorCommands:
    """Implements ``Commands`` for one engine; each command is a task of its host."""

    def __init__(self, engine: RunningEngine, follower: StateFollower) -> None:
        self._engine = engine
        self._follower = follower

    def drain(self, grace: float) -> None:
        """Drain at the coordinator's request. The process stays up until it is stopped."""
        self._engine.host.spawn(self._drain_within(grace), name="engine-drain")

    def change_adapters(self, changes: coordinator_pb2.AdapterChanges) -> None:
        self._engine.host.spawn(self._engine.loras.apply(changes), name="engine-adapters")

    def start_wave(self, wave: int) -> None:
        if (group := self._engine.group) is not None:
            self._engine.host.spawn(group.start_wave(wave), name="engine-wave")

    def take_state(self, wanted: coordinator_pb2.DesiredState) -> None:
        self._follower.take(wanted)

    def refused(self, reason: str) -> None:
        host = self._engine.host
        if reason:
            host.fall_backs.begin("refused", reason)
        else:
            host.fall_backs.end("refused")
        host.spawn(host.health.set_answering(not reason), name="engine-refusal")

    def relieve(self, relief: coordinator_pb2.Relief) -> None:
        if (kv := self._engine.kv) is not None:
            kv.moves.relieve(relief)

    def wait_aside(self, reason: str) -> None:
        if reason:
            self._engine.host.fall_backs.begin("other_weights", reason)
        else:
            self._engine.host.fall_backs.end("other_weights")

    def resize_group(self, size: int) -> None:
        self._engine.host.spawn(self._resize_group(size), name="engine-group")

    async def _resize_group(self, size: int) -> None:
        try:
            await self._engine.resize_group(size)
        except Exception as error:  # of any kind: the engine goes on with its group as it is
            log.error("the data-parallel group is not resized: %s", of_exception(error).message)

    async def _drain_within(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self._engine.drain()
        except TimeoutError:
            await self._engine.end_streams(TryElsewhere(STOPPED))
