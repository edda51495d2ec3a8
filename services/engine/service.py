"""The engine as a service: a core, its front, and the place in the coordinator's registry."""

import asyncio
import functools
import logging
import socket
from pathlib import Path

from tokenloom import checkpoint
from tokenloom.engine_core.client.async_core_client import AsyncClient, AsyncMPClient
from tokenloom.engine_core.errors import EngineConfigError, EngineDeadError, EngineStartError
from tokenloom.engine_core.process.core_launch import CORE_COMMAND
from tokenloom.engine_core.wire.messages import CoreReady
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, Unavailable
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.token_cost import cpu_seconds_of, show_token_cost
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.v1 import coordinator_pb2, engine_pb2_grpc, types_pb2

from .control.engine_admin import EngineAdminServicer
from .control.kv_event_feed import KVEventFeed
from .control.pause import Pause
from .control.role import BY_NAME, NAMES, Role
from .control.sleep import Sleep
from .control.weights import Weights
from .coordinator_link import CoordinatorLink
from .core.core_link import CoreLink
from .engine_metrics import EngineMetrics
from .engine_settings import EngineSettings
from .kv.kv_front import KVFront
from .load import LoadTracker
from .streams.engine_admission import Admission
from .streams.engine_servicer import EngineServicer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""How long peers may take to read the last frames of an engine that goes."""


class EngineService:
    """One engine. Its front serves gRPC in this process; the core computes in another, unless a ``client`` is given."""

    def __init__(self, settings: EngineSettings, client: AsyncClient | None = None) -> None:
        self._settings = settings
        self._client = client
        self._load = LoadTracker()
        self._admission: Admission | None = None
        self._servicer: EngineServicer | None = None
        self._pause: Pause | None = None
        self._kv_events: KVEventFeed | None = None
        self._kv: KVFront | None = None
        self._coordinator: CoordinatorLink | None = None
        self._host: Host | None = None
        self._stopping = False

    async def start(self, host: Host) -> None:
        """Brings the core up, serves, and is ready when the coordinator, if there is to be one, knows it.

        Raises ``InvalidArgument`` for a model or settings that no start would fulfil, ``FailedPrecondition`` with what
        else kept the core down.
        """
        settings = self._settings
        self._host = host
        path = await asyncio.to_thread(checkpoint.resolve, settings.engine.worker.model)
        name = settings.served_model_name or checkpoint.served_name(path, settings.engine.worker.model)
        if self._client is None:
            client = self._client = AsyncMPClient(settings.engine_config(str(path)), _core_command(settings))
            process_metrics.observe_process(host.metrics, "tokenloom_engine_core", lambda: client.pid)
        engine_metrics = EngineMetrics(host.metrics, name, settings.instance_id)
        self._kv_events = KVEventFeed(host.epoch) if settings.engine.cache.kv_events else None
        core = CoreLink(
            self._client,
            self._load,
            engine_metrics,
            kv_events=self._kv_events,
            logs_events=settings.engine.scheduler.log_events,
            tracer=host.tracer,
        )
        try:
            ready = await core.start()
        except EngineConfigError as error:
            raise InvalidArgument(str(error)) from None
        except EngineStartError as error:
            raise FailedPrecondition(str(error)) from None
        engine_metrics.observe_ready(ready, enable_prefix_caching=settings.engine.cache.enable_prefix_caching)
        _show_token_costs(host, engine_metrics, self._client)
        fingerprint = await asyncio.to_thread(_fingerprint, path, name, ready, settings)
        if settings.kv_transports:
            engine_metrics.kv.start_transports(name for name in settings.kv_transports if name != "auto")
            observe = engine_metrics.kv.observe_recompute
            self._kv = KVFront(settings, self._client, core, self._load, ready, host, on_recompute=observe)
        self._serve(host, core, ready, fingerprint)
        if self._coordinator is not None:
            log.info("waiting for the coordinator")
            await self._coordinator.wait_joined()

    async def drain(self) -> None:
        """Refuses new requests and returns when the live ones have their answers, and others the KV held for them."""
        if self._admission is None or self._servicer is None:
            return
        self._admission.refuse_new("the engine is draining; another may take the request")
        self._tell_coordinator(coordinator_pb2.ENGINE_STATE_DRAINING)
        if self._pause is not None and self._pause.leave():
            self._servicer.fail_live(Unavailable("the engine leaves while paused; another may take the request"))
        await self._servicer.idle()
        if self._kv is not None:
            await self._kv.leases_ended()

    async def stop(self) -> None:
        """Answers what is still live with UNAVAILABLE and ends the core. Idempotent."""
        self._stopping = True
        await self._end_streams("the engine has stopped")
        if self._kv is not None:
            await self._kv.close()
        if self._client is not None:
            await self._client.close()

    def _serve(self, host: Host, core: CoreLink, ready: CoreReady, fingerprint: types_pb2.Fingerprint) -> None:
        assert self._client is not None
        settings = self._settings
        hello = make_hello(settings.instance_id, host.epoch, fingerprint=fingerprint)
        limits = types_pb2.ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_logprobs=ready.vocab_size if settings.max_logprobs == -1 else settings.max_logprobs,
            priorities=settings.engine.scheduler.policy == "priority",
            hidden_size=ready.hidden_size if settings.enable_prompt_embeds else 0,
        )
        identity = None
        if settings.coordinator:
            identity = coordinator_pb2.EngineIdentity(
                engine_id=settings.instance_id,
                epoch=host.epoch,
                address=settings.advertise_address or host.address,
                kv_address=self._kv.address if self._kv is not None else "",
                host=socket.gethostname(),
                fingerprint=fingerprint,
                limits=limits,
                num_kv_blocks=ready.num_kv_blocks,
            )
            self._coordinator = CoordinatorLink(
                host.channels.open(settings.coordinator, "coordinator"),
                hello,
                identity,
                self._load,
                self._on_drain,
                BY_NAME[settings.engine.kv.role],
            )
        max_live = settings.engine.scheduler.max_num_seqs + settings.max_waiting
        self._admission = Admission(self._load, self._coordinator, max_live=max_live)
        self._servicer = EngineServicer(
            hello, limits, core, self._admission, self._kv, frame_interval=settings.frame_interval
        )
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, host.server)
        self._pause = Pause(self._client, self._load)
        sleep = Sleep(self._client, self._pause, self._kv.leases_ended if self._kv is not None else None)
        known = [fingerprint, hello.fingerprint, *([identity.fingerprint] if identity is not None else [])]
        tell, spawn = functools.partial(self._take_weights, known), functools.partial(host.spawn, name="engine-weights")
        weights = Weights(self._client, self._pause, self._load, tell, spawn)
        role = self._role(host)
        admin = EngineAdminServicer(
            self._client, ready, fingerprint, self._load, role, self._pause, sleep, weights, self._kv_events
        )
        engine_pb2_grpc.add_EngineAdminServicer_to_server(admin, host.server)
        host.spawn(self._run_core(core), name="engine-core")
        host.spawn(core.run_aborts(), name="engine-aborts")
        if self._kv is not None:
            host.spawn(self._kv.run(), name="engine-kv")
        if self._coordinator is not None:
            host.spawn(self._coordinator.run(), name="engine-coordinator")

    def _role(self, host: Host) -> Role | None:
        """As it can be changed; None without KV to pass on."""

        def tell(value: types_pb2.EngineRole) -> None:
            host.publish(role=NAMES[value])
            if self._coordinator is not None:
                self._coordinator.set_role(value)

        host.publish(role=self._settings.engine.kv.role)
        if self._kv is None:
            return None
        return Role(BY_NAME[self._settings.engine.kv.role], tell, self._kv.leases_ended)

    async def _run_core(self, core: CoreLink) -> None:
        """Until the core is dead: then every live request is answered first, and the service fails."""
        try:
            await core.run()
        except EngineDeadError as error:
            if self._stopping:
                return
            await self._end_streams("the engine failed; another may take the request")
            raise Unavailable(str(error)) from None

    async def _end_streams(self, reason: str) -> None:
        if self._admission is None or self._servicer is None:
            return
        self._admission.refuse_new(reason)
        self._tell_coordinator(coordinator_pb2.ENGINE_STATE_DEAD)
        await self._servicer.close(Unavailable(reason), CLOSE_SECONDS)

    async def _take_weights(self, known: list[types_pb2.Fingerprint], weights: bytes) -> None:
        """Other weights are served from now on: peers learn of it when they connect again."""
        assert self._servicer is not None
        for fingerprint in known:
            fingerprint.weights = weights
        if self._coordinator is not None:
            self._coordinator.rejoin()
        await self._servicer.close(Unavailable("the engine has other weights now"), CLOSE_SECONDS)

    def _tell_coordinator(self, state: coordinator_pb2.EngineState) -> None:
        if self._coordinator is not None:
            self._coordinator.set_state(state)

    def _on_drain(self, grace: float) -> None:
        """The coordinator wants the engine to leave: it finishes what it has, and stays there until it is stopped."""
        assert self._host is not None
        self._host.spawn(self._drain_within(grace), name="engine-drain")

    async def _drain_within(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                await self.drain()
        except TimeoutError:
            await self._end_streams("the engine is leaving")


def _core_command(settings: EngineSettings) -> list[str]:
    flags = {
        "--instance-id": settings.instance_id,
        "--log-level": settings.log_level,
        "--log-format": settings.log_format,
    }
    return [*CORE_COMMAND, *(part for flag in flags.items() for part in flag)]


def _show_token_costs(host: Host, engine_metrics: EngineMetrics, client: AsyncClient) -> None:
    """Of the front, and of the core where that is a process of its own."""

    def num_tokens() -> int:
        return engine_metrics.generation_tokens.value

    show_token_cost(host.metrics, num_tokens)
    if isinstance(client, AsyncMPClient):
        core = functools.partial(cpu_seconds_of, client.pid)
        show_token_cost(host.metrics, num_tokens, prefix="tokenloom_engine_core", cpu_seconds=core)


def _fingerprint(path: Path, name: str, ready: CoreReady, settings: EngineSettings) -> types_pb2.Fingerprint:
    """Reads all weight files, unless their hash is cached."""
    return types_pb2.Fingerprint(
        model=name,
        weights=checkpoint.weights_fingerprint(path) if settings.engine.worker.worker == "model" else b"",
        tokenizer=checkpoint.tokenizer_fingerprint(path),
        block_size=ready.block_size,
        kv_layout=ready.kv_layout,
        numerics=ready.numerics,
    )
