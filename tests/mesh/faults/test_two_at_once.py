"""Two parts are killed in the same instant, or a whole host, in the middle of answers: clients that resume get every
token once."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.mesh.faults.test_killed_gateways import CHAT, STREAMS, GrpcAnswer, Stream
from tests.mesh.faults.test_resumed_everywhere import openai_client, read_until, shown
from tests.mesh.harness import MODEL, SOON, Mesh, Part
from tests.plain_text import PLAIN_TEXT
from tests.ready_channel import ready_channel
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.gateway.service import GatewayService
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.service import OutputProcessorService

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "minLength": 40}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    **STREAMS,
    "schema": ("/v1/chat/completions", CHAT | {"response_format": FORMAT, "ignore_eos": False, "max_tokens": 80}),
}
"""Streams over HTTP, each of another kind."""
WHOLE = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 90, "ignore_eos": True}
BACKGROUND: dict[str, Any] = {
    "model": MODEL,
    "background": True,
    "stream": True,
    "input": "Once upon a time",
    "max_output_tokens": 90,
    "extra_body": {"ignore_eos": True, "seed": 5},
}
STEP_SECONDS = 0.03
HOSTS = "127.0.0.1", "127.0.0.2"
PARTS = "gateway-1", "output_processor-1", "tokenizer-1", "coordinator-0", "engine-2", "engine-3"
"""What is killed: one of two parts of each kind, and the only coordinator. Engines 0 and 2 prefill, 1 and 3 decode."""


class Victim:
    """A part that is a process of its own, with the settings of a part of a mesh."""

    def __init__(self, part: Part, flags: Mapping[str, str]) -> None:
        self.settings = part.settings
        self._flags = flags
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Begin to start it, unless it runs."""
        if self._process is not None and self._process.returncode is None:
            return
        settings = self.settings
        flags = {"listen": settings.listen, "instance-id": settings.instance_id, "metrics-listen": "", **self._flags}
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-m", f"tokenloom.services.{settings.service}", "--log-level", "error", *words]
        self._process = await asyncio.create_subprocess_exec(*command)

    async def ended(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop has not noticed yet
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()


class DoubledMesh(Mesh):
    """A mesh with two parts of each kind, of which the later ones and the coordinator are processes.

    Attributes:
        victims: Those, by name.
        num_resumed: Requests that the output processor here has continued from copies.
    """

    def __init__(self, directory: Path, hosts: Sequence[str] = ()) -> None:
        """``hosts``: addresses of the victims and of the others; empty: they use unix sockets."""
        self._hosts, self._ports = hosts, dict[str, int]()
        self.num_resumed = 0
        super().__init__(
            directory,
            engines=4,
            tokenizers=2,
            output_processors=2,
            engine=self._engine_values,
            gateway={"journal_copies": 2},
        )
        self.victim_http = Path(f"{directory}/victim.http")
        self.victims = {name: self._victim(name) for name in PARTS}

    def address(self, name: str) -> str:
        if not self._hosts:
            return super().address(name)
        host = self._hosts[name not in PARTS and name.removesuffix("-kv") not in PARTS]
        if name not in self._ports:
            with socket.socket() as free:
                free.bind((host, 0))
                self._ports[name] = free.getsockname()[1]
        return f"{host}:{self._ports[name]}"

    def _engine_values(self, index: int) -> dict[str, Any]:
        return {
            "role": ("prefill", "decode")[index % 2],
            "kv_listen": self.address(f"engine-{index}-kv"),
            "kv_transports": ("socket",),
            "kv_socket_listen": f"{HOSTS[0]}:0",
            "hash_step_seconds": STEP_SECONDS,
            "max_model_len": 512,
        }

    def _victim(self, name: str) -> Victim:
        coordinator = {"coordinator": self.address("coordinator-0")}
        if name.startswith("gateway"):
            settings = self.gateway.settings
            assert isinstance(settings, GatewaySettings)
            flags = {
                "tokenizers": ",".join(settings.tokenizers),
                "output-processors": ",".join(settings.output_processors),
                "journal-copies": "2",
                "http-listen": f"unix:{self.victim_http}",
            }
            part = Part(GatewayService, GatewaySettings.of(**self._common(name), **self._gateway_values(settings)))
            return Victim(part, coordinator | flags)
        part = next(each for each in self._all() if each.settings.instance_id == name)
        if name.startswith("coordinator"):
            return Victim(part, {"settle-seconds": "0.2", "pd-threshold": "0"})
        if name.startswith("tokenizer"):
            return Victim(part, {"render-workers": "1"})
        if name.startswith("output"):
            return Victim(part, coordinator)
        assert isinstance(part.settings, EngineSettings)
        values = {key.replace("_", "-"): value for key, value in self._engine_values(int(name[-1])).items()}
        flags = {key: value[0] if isinstance(value, tuple) else str(value) for key, value in values.items()}
        return Victim(part, coordinator | flags | {"worker": "hash", "num-kv-blocks": "512"})

    @staticmethod
    def _gateway_values(settings: GatewaySettings) -> dict[str, Any]:
        names = ("tokenizers", "output_processors", "coordinator")
        return {"http_listen": "127.0.0.1:0", **{name: getattr(settings, name) for name in names}}

    def _all(self) -> list[Part]:
        return [self.coordinator, *self.tokenizers, *self.output_processors, *self.engines]

    @asynccontextmanager
    async def doubled(self) -> "AsyncIterator[DoubledMesh]":
        """All parts; the clients of this process use the first gateway."""
        here = [part for part in self._all() if part.settings.instance_id not in PARTS]
        try:
            await asyncio.gather(*(part.start() for part in (*self.victims.values(), *here)))
            async with asyncio.timeout(SOON):
                await self.gateway.start()
            service = self.output_processors[0].service
            assert isinstance(service, OutputProcessorService)
            copies = service.requests.kept.copies
            count = copies.count

            def counted(outcome: str) -> None:
                self.num_resumed += outcome == "resumed"
                count(outcome)

            copies.count = counted
            yield self
        finally:
            await self.gateway.stop()
            await asyncio.gather(*(part.stop() for part in (*self.victims.values(), *here)))

    async def whole(self, http: httpx.AsyncClient, of_victim: httpx.AsyncClient) -> None:
        """Start what was killed, and wait until both gateways see all parts."""
        await asyncio.gather(*(victim.start() for victim in self.victims.values()))
        async with asyncio.timeout(2 * SOON):
            for client in (http, of_victim):
                while not await _sees_all(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    async def kill(self, *names: str) -> None:
        """Kill parts in the same instant."""
        pids = [self.victims[name].pid for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*(self.victims[name].ended() for name in names))


async def _sees_all(http: httpx.AsyncClient) -> bool:
    try:
        health = (await http.get("/health")).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return False
    parts = health["parts"]
    counts = [parts[name].get("serving", 0) for name in ("output_processor", "tokenizer", "engine")]
    return counts == [2, 2, 4] and parts["coordinator"]["state"] == "ok"


class Answers:
    """One answer of each kind, which clients read through one gateway and then through another one."""

    def __init__(self) -> None:
        self.streams = {name: Stream(*each) for name, each in KINDS.items()}
        self.call = GrpcAnswer()
        self.events: list[Any] = []
        self.whole: dict[str, Any] = {}
        self._key = os.urandom(8).hex()

    async def begin(self, http: httpx.AsyncClient, channel: Any) -> "list[asyncio.Task[Any]]":
        """Ask for all of them, and return what reads them once each has begun."""
        client = openai_client(http)
        response = aiter(await client.responses.create(**BACKGROUND))
        await read_until(response, 6, self.events)
        tasks = [asyncio.create_task(each.read(http)) for each in self.streams.values()]
        tasks += [asyncio.create_task(each) for each in (self.call.generate(channel), self._post(http))]
        tasks.append(asyncio.create_task(self._read(response)))
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(each.begun.wait() for each in self.streams.values()), self.call.begun.wait())
        return tasks

    async def go_on(self, http: httpx.AsyncClient, channel: Any) -> None:
        """Read what is missing through another gateway."""
        readers = [each.read(http) for each in self.streams.values() if not each.is_done]
        if not all(self.call.finished):
            readers.append(self.call.resume(channel))
        if not self.whole:
            readers.append(self._post(http))
        if self.events[-1].type not in ("response.completed", "response.incomplete"):
            client, last = openai_client(http), self.events[-1].sequence_number
            rest = await client.responses.retrieve(self.events[0].response.id, stream=True, starting_after=last)
            readers.append(self._read(aiter(rest)))
        await asyncio.gather(*readers)

    def result(self) -> dict[str, Any]:
        """What the clients have, without what is drawn for each answer."""
        return {
            **{name: each.answer() for name, each in self.streams.items()},
            "gRPC": (self.call.text, self.call.token_ids),
            "whole": self.whole["choices"],
            "background": [shown(event) for event in self.events],
        }

    async def _post(self, http: httpx.AsyncClient) -> None:
        headers = {"Idempotency-Key": self._key}
        response = await http.post("/v1/completions", json=WHOLE, headers=headers)
        assert response.status_code == 200, response.text
        self.whole = response.json()

    async def _read(self, response: Any) -> None:
        async for event in response:
            self.events.append(event)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(mesh_dir: Path) -> AsyncIterator[DoubledMesh]:
    async with DoubledMesh(mesh_dir).doubled() as mesh:
        yield mesh


async def check(mesh: DoubledMesh, *names: str) -> None:
    """Kill parts in the middle of answers, and compare these with others."""
    transport = httpx.AsyncHTTPTransport(uds=str(mesh.victim_http), verify=PLAIN_TEXT)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=SOON) as of_victim,
        mesh.http() as http,
    ):
        await mesh.whole(http, of_victim)
        before = mesh.num_resumed
        async with (
            ready_channel(mesh.victims["gateway-1"].settings.listen) as old,
            ready_channel(mesh.gateway.settings.listen) as channel,
        ):
            answers, references = Answers(), Answers()
            reading = await answers.begin(of_victim, old)
            await mesh.kill(*names)
            results = await asyncio.gather(*reading, return_exceptions=True)
            if "gateway-1" in names:
                assert any(isinstance(each, Exception) for each in results)
                await answers.go_on(http, channel)
            else:
                assert not [each for each in results if isinstance(each, Exception)], results
            await asyncio.gather(*await references.begin(http, channel))
        assert answers.result() == references.result()
        if {"gateway-1", "output_processor-1"} <= {*names}:
            assert mesh.num_resumed > before, "some were only where both were killed"
        else:
            assert mesh.num_resumed == before, "an answer that still runs needs no copy"


@pytest.mark.parametrize("names", list(combinations(PARTS, 2)), ids=" and ".join)
async def test_no_answer_is_lost_with_two_parts(mesh: DoubledMesh, names: tuple[str, str]) -> None:
    await check(mesh, *names)


async def test_no_answer_is_lost_with_a_whole_host(mesh_dir: Path) -> None:
    """The parts of the host that stays are on another address. It has no coordinator any more."""
    (directory := mesh_dir / "h").mkdir()
    async with DoubledMesh(directory, HOSTS).doubled() as mesh:
        await check(mesh, *PARTS)
