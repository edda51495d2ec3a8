"""A mesh of one engine of ours and one for which a real ``vllm serve`` computes; either is killed while clients ask."""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import Served, serving
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from .vllm_server import VLLMProcess

CLIENTS = 12
MAX_TOKENS = 40
SECONDS = 900.0
"""How long anything may take."""


class Adapter:
    """The engine for which vLLM computes, as a process that is started again whenever it ends."""

    def __init__(self, directory: Path, coordinator: str, url: str) -> None:
        self._command = (
            *(sys.executable, "-m", "tokenloom.services.engine", "--instance-id", "vllm-0", "--model", DEMO_MODEL_NAME),
            *("--listen", f"unix:{directory}/vllm-0.sock", "--coordinator", coordinator, "--remote-vllm", url),
            *("--state-file", str(directory / "vllm-0.json"), "--max-num-seqs", "16"),
        )
        self._log = (directory / "vllm-0.log").open("ab")
        self._process: asyncio.subprocess.Process | None = None
        self.num_starts = 0

    async def run(self) -> None:
        """Keep it running until cancelled."""
        try:
            while True:
                self.num_starts += 1
                self._process = await asyncio.create_subprocess_exec(*self._command, stdout=self._log, stderr=self._log)
                await self._process.wait()
                await asyncio.sleep(0.2)
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


@dataclass
class Outcome:
    """What came of the requests.

    Attributes:
        answers: The token ids of each, by number; None: it failed.
        marked: Numbers of those whose answers say that engines of both kinds generated them.
        retried: How many had more than one attempt.
        by_engine: How many each engine ended.
    """

    answers: dict[int, list[int] | None] = field(default_factory=dict)
    marked: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    by_engine: Counter[str] = field(default_factory=Counter)

    @property
    def num_failed(self) -> int:
        return sum(answer is None for answer in self.answers.values())


class Clients:
    """Asks greedy completions of prompts that all differ, some as streams, so many at the same time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.outcome = Outcome()
        self.num_done = 0
        self.go = asyncio.Event()
        self.go.set()

    async def ask(self, numbers: range) -> None:
        """Ask the requests with these numbers."""
        queue = iter(numbers)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=SECONDS, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, queue) for _ in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, queue: Any) -> None:
        for number in queue:
            await self.go.wait()
            try:
                answer = await self._one(http, number)
            except Exception as error:
                self.outcome.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                self.outcome.answers[number] = None
            else:
                self.outcome.answers[number] = answer
            self.num_done += 1

    async def _one(self, http: httpx.AsyncClient, number: int) -> list[int]:
        body = {
            "model": DEMO_MODEL_NAME,
            "prompt": [100 + number % 1500, 7 + number // 1500, *range(20, 30)],
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "return_timeline": True,
            "stream": number % 2 == 1,
        }
        if not body["stream"]:
            response = await http.post("/v1/completions", json=body)
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.text}")
            events = [response.json()]
        else:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
        if error := next((event["error"] for event in events if "error" in event), None):
            raise RuntimeError(str(error))
        token_ids = [token_id for event in events for choice in event["choices"] for token_id in choice["token_ids"]]
        if len(token_ids) != MAX_TOKENS:
            raise RuntimeError(f"{len(token_ids)} tokens")
        if events[-1].get("mixed_numerics"):
            self.outcome.marked.append(number)
        self.outcome.by_engine[events[-1]["timeline"]["decode_engine"]] += 1
        return token_ids


class MixedMesh:
    """A served mesh with an adapter beside its engine."""

    def __init__(self, served: Served, adapter: Adapter, vllm: VLLMProcess) -> None:
        self.served = served
        self.adapter = adapter
        self.vllm = vllm

    async def until_both_serve(self) -> None:
        """Return when the engine of ours and that of vLLM's serve."""
        async with asyncio.timeout(SECONDS), httpx.AsyncClient(base_url=self.served.url, trust_env=False) as http:
            while await self._num_serving(http) < 2:  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.5)

    async def _num_serving(self, http: httpx.AsyncClient) -> int:
        try:
            return int((await http.get("/health")).json()["parts"]["engine"]["serving"])
        except (httpx.HTTPError, ValueError, KeyError):
            return 0

    def kill_ours(self) -> None:
        self.served.part("engine").kill()

    def kill_theirs(self) -> None:
        self.vllm.kill()
        self.vllm.start()


def _coordinator_of(served: Served) -> Path:
    """Return the socket of the mesh's coordinator."""
    return next(Path(served.environment["XDG_RUNTIME_DIR"]).rglob("coordinator-0.sock"))


@asynccontextmanager
async def mixed_mesh(vllm: VLLMProcess, directory: Path) -> AsyncIterator[MixedMesh]:
    """Serve the demo model in float32 by one engine of ours; the adapter of vLLM joins when it is started."""
    with serving() as serve:
        flags = ("--dtype", "float32", "--engines", "1", "--mixed-numerics", "--max-num-seqs", "16")
        served = await asyncio.to_thread(serve, *flags)
        adapter = Adapter(directory, f"unix:{await asyncio.to_thread(_coordinator_of, served)}", vllm.url)
        yield MixedMesh(served, adapter, vllm)


async def campaign(vllm: VLLMProcess, directory: Path, num_requests: int, report: Callable[[str], None]) -> Outcome:
    """Ask so many requests, with kills of either engine, and return what came of them. ``vllm`` serves already."""
    async with mixed_mesh(vllm, directory) as mesh:
        reference = Clients(mesh.served.url)
        await reference.ask(range(num_requests))
        report(f"reference, ours alone: {num_requests - reference.outcome.num_failed} of {num_requests} answered")
        running = asyncio.create_task(mesh.adapter.run())
        try:
            await mesh.until_both_serve()
            clients = Clients(mesh.served.url)
            asking = asyncio.create_task(clients.ask(range(num_requests)))
            await _kill_by_turns(mesh, clients, num_requests, report)
            await asking
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    outcome = clients.outcome
    moved = [
        number
        for number, answer in outcome.answers.items()
        if answer is not None and answer != reference.outcome.answers[number]
    ]
    unmarked = [number for number in moved if number not in outcome.marked]
    report(f"ended by engine: {dict(outcome.by_engine)}; adapter started {mesh.adapter.num_starts} times")
    report(f"failed: {outcome.num_failed} {dict(outcome.errors)}")
    report(f"went on at an engine of the other kind (marked): {len(outcome.marked)}")
    report(f"tokens other than those of ours alone: {len(moved)}, of these without the mark: {len(unmarked)}")
    return outcome


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CONSTRAINED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": SCHEMA}, lambda text: type(json.loads(text)["a"]) is bool),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "[0-9]{3}x"}, lambda text: re.fullmatch("[0-9]{3}x", text) is not None),
    "choice": ({"choice": ["yellow", "purple"]}, lambda text: text in ("yellow", "purple")),
    "grammar": ({"grammar": 'root ::= "left" | "right"'}, lambda text: text in ("left", "right")),
}
"""Constraints that the demo model would not keep by itself, and what shows that an output keeps one."""


def check_constraints(vllm: VLLMProcess) -> str:
    """Ask a mesh whose one engine is vLLM for constrained outputs. Raises ``AssertionError`` for one that breaks its
    constraint."""
    with serving() as serve:
        served = serve("--remote-vllm", vllm.url, "--max-num-seqs", "16")
        with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as http:
            for name, (constraint, holds) in CONSTRAINED.items():
                body = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "seed": 1}
                body |= {"model": DEMO_MODEL_NAME, "structured_outputs": constraint}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, f"{name}: {answer.text[:300]}"
                (choice,) = answer.json()["choices"]
                is_cut = name == "json_object" and choice["finish_reason"] == "length"
                assert choice["text"].startswith("{") if is_cut else holds(choice["text"]), f"{name}: {choice}"
            turns = [{"role": "user", "content": "Look at it."}]
            body = {"messages": turns, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
            answer = http.post("/v1/chat/completions", json={"model": DEMO_MODEL_NAME, **body})
            assert answer.status_code == 200, f"tool: {answer.text[:300]}"
            (choice,) = answer.json()["choices"]
            (call,) = choice["message"]["tool_calls"]
            arguments, is_cut = call["function"]["arguments"], choice["finish_reason"] == "length"
            assert arguments.startswith("{") if is_cut else type(json.loads(arguments)["a"]) is bool, choice
    return f"{', '.join(CONSTRAINED)} and a required tool hold"


async def _kill_by_turns(mesh: MixedMesh, clients: Clients, num_requests: int, report: Callable[[str], None]) -> None:
    kills: list[tuple[str, Callable[[], None]]] = [
        ("ours", mesh.kill_ours),
        ("theirs", mesh.kill_theirs),
        ("ours", mesh.kill_ours),
        ("the adapter", mesh.adapter.kill),
        ("theirs", mesh.kill_theirs),
        ("ours", mesh.kill_ours),
    ]
    for index, (name, kill) in enumerate(kills, 1):
        async with asyncio.timeout(SECONDS):
            while clients.num_done < num_requests * index // (len(kills) + 1):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        clients.go.clear()  # so that both serve when the next kill comes; requests that run go on
        await mesh.until_both_serve()
        clients.go.set()
        async with asyncio.timeout(SECONDS):
            enough = clients.num_done + CLIENTS // 2
            while clients.num_done < min(enough, num_requests - CLIENTS):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        kill()
        report(f"killed {name} after {clients.num_done} answers")
