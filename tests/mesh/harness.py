"""The whole mesh in one event loop: five services over unix sockets; the engines' cores run the hash worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from tests.plain_text import PLAIN_TEXT
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.engine.service import EngineService
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.host import listener
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import Service, running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.tokenizer.service import TokenizerService
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings

MODEL = DEMO_MODEL_NAME
VOCAB_SIZE: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
MAX_MODEL_LEN = 256
SOON = 30.0
"""Bound of every wait: a hang is a failure."""
_HELD = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
"""Zero where nothing is held."""


class Part:
    """A service that a test may end and start again."""

    def __init__(self, make: Callable[[Any], Service], settings: ServiceSettings) -> None:
        self.settings = settings
        self.service: Service | None = None
        self.host: Host | None = None
        self._make = make
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it serves."""
        self._stop.clear()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(started), name=self.settings.instance_id)
        await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self._task  # raises why

    async def stop(self) -> None:
        """Drains and stops it."""
        self._stop.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def kill(self) -> None:
        """Ends it without draining; connections just break."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None

    def core_pid(self) -> int:
        """Return the process of an engine's core, which is a child of this process."""
        (core,) = (child for child in psutil.Process().children() if self.settings.instance_id in child.cmdline())
        return core.pid

    async def _run(self, started: "asyncio.Future[None]") -> None:
        self.service = self._make(self.settings)
        async with running(self.service, self.settings) as self.host:
            started.set_result(None)
            await self._stop.wait()


class Mesh:
    """Coordinator, tokenizers, output processors, engines and one gateway.

    Args:
        directory: For the sockets.
        engines, tokenizers, output_processors: How many.
        engine: Settings of every engine, or of the one with a number, beside the worker.
        gateway: Settings of the gateway.
        coordinator: Settings of the coordinator.
        output_processor: Settings of every output processor.
        certificates: Folder that ``make_certificates`` filled; None: everybody talks in plain text.
        common: Settings of every part.
    """

    def __init__(
        self,
        directory: Path,
        *,
        engines: int = 1,
        tokenizers: int = 1,
        output_processors: int = 1,
        engine: dict[str, Any] | Callable[[int], dict[str, Any]] | None = None,
        gateway: dict[str, Any] | None = None,
        coordinator: dict[str, Any] | None = None,
        output_processor: dict[str, Any] | None = None,
        certificates: Path | None = None,
        common: dict[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.common = common or {}
        self.certificates = certificates
        self.tokenizer: Tokenizer = load_tokenizer(DEMO_MODEL)
        self._coordinator_settings = coordinator or {}
        self._output_processor_settings = output_processor or {}
        self.coordinator = self._coordinator()
        self.tokenizers = [self._tokenizer(index) for index in range(tokenizers)]
        self.output_processors = [self._output_processor(index) for index in range(output_processors)]
        self._engine_settings = engine if callable(engine) else lambda _: engine or {}
        self.engines = [self.new_engine(index) for index in range(engines)]
        self.gateway = self._gateway(gateway or {})

    def address(self, name: str) -> str:
        return f"unix:{self.directory}/{name}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Mesh"]:
        """All parts, the gateway last: it is ready when the mesh is whole."""
        parts = [self.coordinator, *self.tokenizers, *self.output_processors, *self.engines]
        try:
            await asyncio.gather(*(part.start() for part in parts))
            async with asyncio.timeout(SOON):
                await self.gateway.start()
            yield self
        finally:
            # Without the times in which a client that was just answered makes its next call: none is left.
            with patch.multiple(listener, HOLD_SECONDS=0.0, _GOAWAY_SECONDS=0.0):
                await self.gateway.stop()
                await asyncio.gather(*(part.stop() for part in parts))

    @property
    def parts(self) -> "list[Part]":
        return [self.gateway, self.coordinator, *self.tokenizers, *self.output_processors, *self.engines]

    @property
    def url(self) -> str:
        service = self.gateway.service
        assert isinstance(service, GatewayService)
        return f"http://{service.http_address}"

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**{"base_url": self.url, "timeout": SOON, "verify": PLAIN_TEXT, **options})

    def _observer(self) -> httpx.AsyncClient:
        """A client that has a key if one is needed."""
        settings = self.gateway.settings
        assert isinstance(settings, GatewaySettings)
        return self.http(headers={"Authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else None)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def expected(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """What any engine must generate after this prompt, if nothing ends it early."""
        return expected_tokens(prompt_ids, num_tokens, VOCAB_SIZE)

    async def gauge(self, name: str, engine: str = "engine-0") -> float:
        """One of ``tokenloom_engine_…``, as the gateway shows it."""
        async with self._observer() as http:
            return (await self._gauges(http, name))[engine]

    async def until_running(self, number: int = 1) -> None:
        """The engines run this many requests."""
        async with asyncio.timeout(SOON), self._observer() as http:
            while sum((await self._gauges(http, "requests_running")).values()) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_missing(self, *parts: str) -> None:
        """Wait until ``/health`` reports exactly these parts as missing."""
        async with asyncio.timeout(SOON), self._observer() as http:
            while _missing((await http.get("/health")).json()) != list(parts):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await http.get("/health")).status_code == (200 if set(parts) <= {"coordinator"} else 503)

    async def until_idle(self) -> None:
        """Wait until every engine has given back all it held."""
        async with asyncio.timeout(SOON), self._observer() as http:
            while any((await self._gauges(http, *_HELD)).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _gauges(self, http: httpx.AsyncClient, *names: str) -> dict[str, float]:
        """Their sum, by engine, once the gateway knows all of them of each engine of this mesh."""
        async with asyncio.timeout(SOON):
            values = await self._known(http, names)
            while min(map(len, values.values())) < len(names):
                await asyncio.sleep(0.01)
                values = await self._known(http, names)
        return {engine: sum(found) for engine, found in values.items()}

    async def _known(self, http: httpx.AsyncClient, names: Sequence[str]) -> dict[str, list[float]]:
        full_names = {f"tokenloom_engine_{name}" for name in names}
        values: dict[str, list[float]] = {part.settings.instance_id: [] for part in self.engines}
        for family in text_string_to_metric_families((await http.get("/metrics")).text):
            for sample in family.samples:
                if sample.name in full_names:
                    values.setdefault(sample.labels["engine"], []).append(sample.value)
        return values

    def _coordinator(self) -> Part:
        values = {"settle_seconds": 0.2, **self._coordinator_settings}
        settings = CoordinatorSettings.of(**self._common("coordinator-0"), **values)
        return Part(CoordinatorService, settings)

    def _tokenizer(self, index: int) -> Part:
        settings = TokenizerSettings.of(**self._common(f"tokenizer-{index}"), render_workers=1)
        return Part(TokenizerService, settings)

    def _output_processor(self, index: int) -> Part:
        settings = OutputProcessorSettings.of(
            **self._common(f"output_processor-{index}"),
            coordinator=self.address("coordinator-0"),
            **self._output_processor_settings,
        )
        return Part(OutputProcessorService, settings)

    def new_engine(self, index: int) -> Part:
        """Returns an engine that is not started yet."""
        values: dict[str, Any] = {
            "worker": "hash",
            "coordinator": self.address("coordinator-0"),
            "max_model_len": MAX_MODEL_LEN,
            "num_kv_blocks": 512,
        }
        settings = EngineSettings.of(**self._common(f"engine-{index}"), **(values | self._engine_settings(index)))
        return Part(EngineService, settings)

    def _gateway(self, extra: dict[str, Any]) -> Part:
        settings = GatewaySettings.of(
            **self._common("gateway-0"),
            http_listen="127.0.0.1:0",
            tokenizers=[part.settings.listen for part in self.tokenizers],
            output_processors=[part.settings.listen for part in self.output_processors],
            coordinator=self.address("coordinator-0"),
            **extra,
        )
        return Part(GatewayService, settings)

    def _common(self, name: str) -> dict[str, Any]:
        common = {"instance_id": name, "listen": self.address(name), "metrics_listen": "", "drain_timeout": 0.5}
        common |= self.common
        if self.certificates is None:
            return common
        part = name.rpartition("-")[0].replace("_", "-")
        files = {"tls_ca": "ca.crt", "tls_cert": f"{part}.crt", "tls_key": f"{part}.key"}
        return common | {setting: self.certificates / file for setting, file in files.items()}


def _missing(health: dict[str, Any]) -> list[str]:
    return [name for name, part in health["parts"].items() if part["state"] == "missing"]
