"""Builds the mesh of a plan out of the real services, without tokenizers, HTTP and processes of cores."""

import asyncio
import functools
from collections import Counter
from random import Random
from typing import Any

import msgspec

from benchmarks.scale.takeover.lease_server import LeaseServer
from tokenloom.engine_core.data.config import StructuredOutputConfig
from tokenloom.model_files.checkpoint import tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.lease import KubernetesLease
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.running_engine import RunningEngine
from tokenloom.services.engine.service import EngineService
from tokenloom.services.gateway import service as gateway_service
from tokenloom.services.gateway.generation.generator import Generator
from tokenloom.services.gateway.serving.served_meshes import ServedMeshes
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.settings.mesh_spec import mesh_specs
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.host_dependencies import HostDependencies
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.v1.types_pb2 import Fingerprint

from .core_client import CoreClient
from .encoders import SimulatedEncoder
from .kv_memory import MemoryTransport, Pools
from .network import Network
from .parts import Make, Part
from .plan import Plan
from .reference import VOCAB_SIZE, load_once
from .tokenizers import SimulatedTokenizer
from .virtual_loop import Process

MAX_MODEL_LEN = 128
LEASE_SECONDS = 0.6
"""Short, so that leases end while blocks are read."""
HANG_SECONDS = 4.0
"""After so long without a step an engine counts as hung. It may wait for blocks of a frozen engine for most of it."""
KEPT_BYTES = 1 << 20
"""Room for the prompts that the gateway keeps."""


class SimulatedGateway:
    """Runs the gateway without its HTTP and gRPC edges: clients use its generator.

    Attributes:
        generator: Runs requests, once started.
    """

    generator: Generator

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings

    async def start(self, host: Host) -> None:
        settings = self._settings
        shares = gateway_service._divide(settings, gateway_service._load_keys(settings, host))
        meshes = ServedMeshes(mesh_specs(settings))
        await gateway_service._connect(meshes, settings, host, shares)
        await gateway_service._wait_whole(meshes)
        self.generator = meshes.first.generator

    async def drain(self) -> None:
        await self.generator.drain()

    async def stop(self) -> None:
        """Do nothing: the process ends."""


class SimulatedEngine(EngineService):
    """Shows the engine that it started, and its core."""

    engine: RunningEngine

    def __init__(self, settings: EngineSettings, core: CoreClient) -> None:
        super().__init__(settings, core)
        self.core = core

    async def start(self, host: Host) -> RunningEngine:
        self.engine = await super().start(host)
        return self.engine


class SimulatedOutputProcessor(OutputProcessorService):
    """Counts what becomes of its copies of others' requests, also after its process has ended."""

    def __init__(self, settings: OutputProcessorSettings, copies_used: Counter[str]) -> None:
        super().__init__(settings, load_once)
        self._copies_used = copies_used

    async def start(self, host: Host) -> None:
        await super().start(host)
        self.requests.kept.copies.count = lambda outcome: self._copies_used.update([outcome])


class Mesh:
    """Holds the parts of one run.

    Attributes:
        parts: By name, the gateways last.
        copies_used: What became of copies of requests.
    """

    def __init__(self, network: Network, plan: Plan) -> None:
        self.network = network
        self.plan = plan
        self.pools = Pools(network)
        self.parts: dict[str, Part] = {}
        self.copies_used: Counter[str] = Counter()
        self.leases = LeaseServer()
        for name in plan.coordinators:
            common = _common(name) | {"listen": address("coordinator-0")}
            factor = 1.2 if plan.rebalances else 0.0
            settings = CoordinatorSettings(**common, settle_seconds=0.5, pd_threshold=24, rebalance=factor)
            self._add(settings, self._coordinator)
        for name in plan.tokenizers:
            self._add(TokenizerSettings(**_common(name)), _tokenizer)
        for name in plan.encoders:
            self._add(EncoderSettings(**_common(name), coordinator=address("coordinator-0")), _encoder)
        for name in plan.output_processors:
            self._add(
                OutputProcessorSettings(
                    **_common(name), coordinator=address("coordinator-0"), engine_hang_timeout=HANG_SECONDS
                ),
                self._output_processor,
            )
        for name, role in zip(plan.engines, plan.roles, strict=True):
            moves = {"moves": plan.migrates, "relieves": plan.rebalances}
            self._add(_engine_settings(name, role, plan.num_blocks, plan.rows_bytes, **moves), self._engine)
        processors = tuple(address(name) for name in plan.output_processors)
        for name in plan.gateways:
            tokenizers = tuple(map(address, plan.tokenizers))
            self._add(
                _gateway_settings(name, processors, tokenizers, copies=2 if plan.copies_journals else 1), _gateway
            )

    async def start(self) -> None:
        """Start every part; return when a request would be answered."""
        await asyncio.gather(*(part.start() for part in self.parts.values()))

    def active_coordinators(self) -> list[Part]:
        """Return the coordinators that serve."""
        return [part for part in self.of_kind("coordinator") if part.is_ready and part.process is not None]

    def of_kind(self, kind: str) -> list[Part]:
        """Return the parts of one service."""
        return [part for part in self.parts.values() if part.kind == kind]

    def _add(self, settings: Any, make: Any) -> None:
        bound: Make = functools.partial(make, settings)
        may_stand_by = settings.service == "coordinator" and self.plan.num_coordinators > 1
        self.parts[settings.instance_id] = Part(
            self.network, self.plan.seed, settings, bound, may_stand_by=may_stand_by
        )

    def _coordinator(
        self, settings: CoordinatorSettings, process: Process, world: HostDependencies
    ) -> CoordinatorService:
        if self.plan.num_coordinators == 1:
            return CoordinatorService(settings)
        identity = f"{settings.instance_id}_{world.random.getrandbits(64):016x}"
        return CoordinatorService(settings, KubernetesLease(self.leases, "coordinator", identity))

    def _output_processor(
        self, settings: OutputProcessorSettings, process: Process, world: HostDependencies
    ) -> OutputProcessorService:
        return SimulatedOutputProcessor(settings, self.copies_used)

    def _engine(self, settings: EngineSettings, process: Process, world: HostDependencies) -> SimulatedEngine:
        transports = [MemoryTransport(self.pools, process)] if settings.kv_transports else []
        config = _core_config(settings)
        return SimulatedEngine(
            settings, CoreClient(config, VOCAB_SIZE, self.plan, Random(world.random.random()), transports)
        )


def address(name: str) -> str:
    """Return where a part listens."""
    return f"unix:/simulation/{name}"


@functools.cache
def _fingerprint() -> Fingerprint:
    return Fingerprint(model="tokenloom-demo", tokenizer=tokenizer_fingerprint(DEMO_MODEL))


@functools.cache
def _core_config(settings: EngineSettings) -> Any:
    config = settings.engine_config("")
    # Grammars are those of the simulated compilers, which read no tokenizer.
    worker, grammars = msgspec.structs.replace(config.worker, model=""), StructuredOutputConfig()
    return msgspec.structs.replace(config, worker=worker, structured_output=grammars)


def _common(name: str) -> dict[str, Any]:
    return {"instance_id": name, "listen": address(name), "metrics_listen": "", "drain_timeout": 20.0}


@functools.cache
def _engine_settings(
    name: str, role: str, num_blocks: int, rows_bytes: int, *, moves: bool, relieves: bool
) -> EngineSettings:
    moves_kv = moves or role != "both"
    return EngineSettings.of(
        **_common(name),
        worker="hash",
        role=role,
        coordinator=address("coordinator-0"),
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=num_blocks,
        rows_cache_bytes=rows_bytes,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_listen=address(f"{name}-kv") if moves_kv else "",
        kv_transports=("shm",) if moves_kv else (),
        kv_lease_seconds=LEASE_SECONDS,
        kv_load_timeout=2.0,
        drain="migrate" if moves else "finish",
        move_before_preemption=relieves,
    )


@functools.cache
def _gateway_settings(
    name: str, processors: tuple[str, ...], tokenizers: tuple[str, ...], *, copies: int
) -> GatewaySettings:
    return GatewaySettings.of(
        **_common(name),
        http_listen="127.0.0.1:0",
        tokenizers=list(tokenizers),
        output_processors=list(processors),
        coordinator=address("coordinator-0"),
        max_kept_prompt_bytes=KEPT_BYTES,
        journal_copies=copies,
    )


def _tokenizer(settings: TokenizerSettings, process: Process, world: HostDependencies) -> SimulatedTokenizer:
    return SimulatedTokenizer(settings, _fingerprint())


def _encoder(settings: EncoderSettings, process: Process, world: HostDependencies) -> SimulatedEncoder:
    return SimulatedEncoder(settings, _fingerprint())


def _gateway(settings: GatewaySettings, process: Process, world: HostDependencies) -> SimulatedGateway:
    return SimulatedGateway(settings)
