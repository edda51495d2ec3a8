"""Meshes of prefill and decode engines whose cores run in the test's process: tests see into them and kill them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.engine_core.client.inproc import AsyncInprocClient
from tests.engine_core.invariants import check_idle
from tests.mesh.harness import SOON, VOCAB_SIZE, Mesh, Part
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.engine_core.fake_workers import hash_worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_transfer import kv_copier
from tokenloom.model_files.model_path import DEMO_MODEL, resolve
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.engine.core.core_main import make_transports
from tokenloom.services.engine.core.workers import WORKER_COMMAND
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.records.grammar_config import reasoning_config, structured_output_config
from tokenloom.services.engine.running_engine import RunningEngine
from tokenloom.services.engine.service import EngineService
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_SERVING

MAX_MODEL_LEN = 2048
POLL_SECONDS = 0.002
"""How often a test looks for what nobody tells it."""


class _Watch:
    """Makes a state last until the test has seen it, however busy the machine is.

    A slow step or copy of the cores on threads ends only after a test that waits for something has looked again.
    """

    def __init__(self) -> None:
        self.num_looking = 0
        self.num_looks = 0

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        # The next look may have begun before the state: the one after it has not.
        enough = self.num_looks + 2
        while self.num_looking and self.num_looks < enough:
            time.sleep(POLL_SECONDS)

    async def until(self, holds: Callable[[], object]) -> None:
        self.num_looking += 1
        try:
            async with asyncio.timeout(SOON):
                while not holds():
                    self.num_looks += 1
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            self.num_looking -= 1


_watch = _Watch()


class _ObservedService(EngineService):
    """Shows the engine that it started."""

    engine: RunningEngine

    async def start(self, host: Host) -> RunningEngine:
        self.engine = await super().start(host)
        return self.engine


class SplitEngine(Part):
    """An engine with its core on a thread of this process."""

    def __init__(self, settings: EngineSettings) -> None:
        self.client = _client(settings)
        self.role = settings.engine.kv.role
        self.is_alive = True
        super().__init__(lambda settings: _ObservedService(settings, self.client), settings)

    @property
    def core(self) -> EngineCore:
        assert self.client._core is not None, "not started"
        return self.client._core

    @property
    def name(self) -> str:
        return self.settings.instance_id

    @property
    def is_idle(self) -> bool:
        """No request, no lease, no load, no block that is held."""
        scheduler = self.core.scheduler
        is_free = scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
        return not scheduler.requests and not self.core.has_work() and not self.stats.num_leases and is_free

    @property
    def stats(self) -> Any:
        return self.core.scheduler.stats()

    async def until(self, holds: Callable[["SplitEngine"], object]) -> None:
        """Waits for what the core does beside this loop, and tells nobody."""
        await _watch.until(lambda: holds(self))

    def check_idle(self) -> None:
        """No block leaked."""
        check_idle(self.core.scheduler)

    def recomputes(self) -> dict[str, int]:
        """Requests whose KV was computed anew, by reason."""
        return self._counted("tokenloom_kv_recompute_total")

    def moves(self) -> dict[str, int]:
        """Requests that left for another engine, by reason."""
        return self._counted("tokenloom_kv_moves_total")

    def _counted(self, name: str) -> dict[str, int]:
        return {
            sample.labels["reason"]: int(sample.value)
            for family in self._host.metrics.collect()
            for sample in family.samples
            if sample.name == name and sample.value
        }

    def fired(self) -> Counter[str]:
        """How often each failpoint that is set has fired here."""
        return Counter(self.core.failpoints_fired())

    async def kill(self) -> None:
        """Ends it as a crash would: every stream breaks at once, nobody is told anything."""
        self.is_alive = False
        await self.cut_kv()
        await self._host._tasks.close()
        await self._host._listener.close(0)
        await super().kill()

    async def cut_kv(self) -> None:
        """Nobody reaches its KV port any more."""
        assert isinstance(self.service, _ObservedService), "not started"
        kv = self.service.engine.kv
        if kv is not None and kv._server is not None:
            await kv._server.close(0)

    @property
    def _host(self) -> Host:
        assert self.host is not None, "not started"
        return self.host


def _client(settings: EngineSettings) -> AsyncInprocClient:
    is_hash = settings.engine.worker.worker == "hash"
    # Without a checkpoint the hash worker's tokens are any of the vocabulary.
    config = settings.engine_config("" if is_hash else str(resolve(settings.engine.worker.model)))
    config = msgspec.structs.replace(
        config,
        structured_output=structured_output_config(DEMO_MODEL),
        reasoning=reasoning_config(DEMO_MODEL, config.reasoning),
    )
    return AsyncInprocClient(config, _executor(config), make_transports(config))


def _executor(config: EngineConfig) -> Executor:
    is_hash = config.worker.worker == "hash"
    if config.parallel.distributed_executor_backend == "mp":
        # The hash worker's process gets its vocabulary from the checkpoint.
        worker_config = msgspec.structs.replace(config.worker, model=str(DEMO_MODEL))
        return MultiprocExecutor(msgspec.structs.replace(config, worker=worker_config), WORKER_COMMAND)
    if is_hash:
        worker: Worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    else:
        from tokenloom.gpu_worker.devices import CPUWorker  # the other tests need no torch

        worker = CPUWorker(config)
    return ThreadedExecutor(worker) if config.scheduler.async_scheduling else UniProcExecutor(worker)


class SplitMesh(Mesh):
    """Args:
    roles: One engine of each.
    engine: Settings of all engines; ``prefill``, ``decode``: of those only.
    gateway, output_processor, coordinator: Settings of these.
    pd_threshold: 0, so that even one token goes from engine to engine.
    """

    engines: list[SplitEngine]  # type: ignore[assignment]

    def __init__(
        self,
        directory: Path,
        roles: Sequence[str] = ("prefill", "decode"),
        *,
        engine: Mapping[str, Any] | None = None,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        output_processor: dict[str, Any] | None = None,
        coordinator: dict[str, Any] | None = None,
        pd_threshold: int = 0,
        certificates: Path | None = None,
        common: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            directory,
            engines=0,
            gateway=gateway,
            coordinator={"pd_threshold": pd_threshold, **(coordinator or {})},
            output_processor=output_processor,
            certificates=certificates,
            common=common,
        )
        of_role = {"prefill": prefill or {}, "decode": decode or {}}
        for role in roles:
            self.new_engine(role, **{**(engine or {}), **of_role.get(role, {})})

    def new_engine(self, role: str, **values: Any) -> SplitEngine:
        """One more, not started yet."""
        name = f"engine-{len(self.engines)}"
        defaults: dict[str, Any] = {
            "worker": "hash",
            "role": role,
            "dtype": "float32",
            "num_threads": 1,
            "coordinator": self.address("coordinator-0"),
            "max_model_len": MAX_MODEL_LEN,
            "num_kv_blocks": 512,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 32,
            "kv_listen": self.address(f"{name}-kv"),
            "kv_transports": ("shm", "socket"),
            "kv_checksum": True,
            "kv_lease_seconds": 20.0,
            "kv_load_timeout": 20.0,
        }
        engine = SplitEngine(EngineSettings.of(**self._common(name), **(defaults | values)))
        self.engines.append(engine)
        return engine

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SplitMesh"]:
        """As of any mesh, once every engine is known."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (hash_worker, kv_copier):
                patch.setattr(module, "time", SimpleNamespace(sleep=_watch.sleep, monotonic=time.monotonic))
            async with self._running_all():
                yield self

    @asynccontextmanager
    async def _running_all(self) -> AsyncIterator[None]:
        async with super().running():
            try:
                await self.until_known(*(engine.name for engine in self.engines))
                yield
            finally:  # also those that came later
                await asyncio.gather(*(engine.stop() for engine in self.engines))

    def of_role(self, role: str) -> SplitEngine:
        """The first one."""
        return next(engine for engine in self.engines if engine.role == role)

    async def until_known(self, *names: str) -> None:
        """The coordinator knows these engines as ready for requests."""
        async with asyncio.timeout(SOON):
            while not self.known().issuperset(names):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    async def check_nothing_is_left(self) -> None:
        """Every engine that lives gives back all that it held: requests, leases, loads, blocks."""
        for engine in self.engines:
            if not engine.is_alive:
                continue
            try:
                await engine.until(lambda engine: engine.is_idle)
            except TimeoutError:
                raise AssertionError(f"{engine.name} ({engine.role}) still holds {engine.stats}") from None
            engine.check_idle()

    def known(self) -> set[str]:
        """Names of the engines that the coordinator would pick."""
        service = self.coordinator.service
        assert isinstance(service, CoordinatorService)
        return {
            entry.identity.engine_id
            for entry in snapshot_of(service.servicer._registry).engines
            if entry.report.state == ENGINE_STATE_SERVING
        }
