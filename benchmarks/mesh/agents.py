"""Runs ``bench agents``: sessions of coding agents on a mesh, with their tools' gaps, branches and sub-agents.

The clients ignore what the model answers and continue with a conversation that was made before the run: no model is
needed that calls tools, and every arm gets the same requests. A prompt therefore shares with the session's past what
was sent before, and nothing of what was generated.
"""

import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.mesh import Mesh

from ..load.agent_bodies import request_of
from ..load.agent_sessions import AgentClient, AgentSession, Line, Message, Shape, Turn, make_sessions
from ..load.arrivals import Done
from ..load.events import Outcome
from ..load.http_client import Endpoint, Sender
from ..report import machine
from .agents_report import TurnRecord, summarize
from .local_mesh import http_url, pids_by_service, with_mesh

_NAME = "bench"
_CONTEXT = 262_144
_BLOCK = 16
_MESSAGE_TOKENS = 5
"""Marks of a message in the chat template of the demo model."""
_LEAST_ANSWER = 4
_OFFLOAD_BYTES = 8 << 30


class Placement(StrEnum):
    """Names the rules by which a coordinator compares engines."""

    SCORE = "score"
    COST = "cost"


class Policy(StrEnum):
    """Says what the mesh knows of a request's past."""

    SESSIONS = "sessions"
    """Requests of a session go where its KV is, and its blocks are evicted by when it is expected back."""
    SHARED = "shared"
    """As sessions, and the engines share a folder of KV blocks, so that a turn may run on any of them."""
    LRU = "lru"
    """None: blocks are evicted that were used least recently."""


class AgentWorker(StrEnum):
    """Names what computes the requests."""

    TIMED = "timed"
    MODEL = "model"


_NO_SESSIONS = {Policy.SESSIONS: (), Policy.SHARED: (), Policy.LRU: ("--no-sessions",)}


@dataclass(frozen=True)
class AgentsCase:
    """Describes one arm.

    Attributes:
        kv: KV blocks of all engines together, as a multiple of what all sessions hold at their mean length.
        offload: Whether evicted blocks go to a file.
        time_scale: Gaps are so many times shorter, answers have so many times fewer tokens, and the timed worker
            computes a prompt so many times faster.
        step_ms: What a step of the timed worker takes, beside its tokens.
        prefill_rate: Tokens per second of the timed worker, before ``time_scale``.
    """

    sessions: int = 24
    clients: tuple[AgentClient, ...] = tuple(AgentClient)
    turns: tuple[int, int] = Shape.turns
    kv: float = 1 / 3
    placement: Placement = Placement.SCORE
    policy: Policy = Policy.SESSIONS
    offload: bool = True
    worker: AgentWorker = AgentWorker.TIMED
    engines: int = 2
    time_scale: float = 10.0
    step_ms: float = 15.0
    prefill_rate: float = 15_000.0
    seed: int = 0

    @property
    def title(self) -> str:
        return f"{self.placement}, {self.policy}, KV {self.kv:.2g}{', offload' if self.offload else ''}"

    def make_sessions(self, tokenizer: Tokenizer) -> list[AgentSession]:
        """Make the sessions of the arm, the same for each arm of these sizes."""
        shape = replace(Shape(), turns=self.turns)
        return make_sessions(self.sessions, self.clients, shape, self.seed, tokenizer)


def arms(
    case: AgentsCase, rounds: int, kv: Sequence[float], placements: Iterable[Placement], policies: Iterable[Policy]
) -> list[AgentsCase]:
    """Return the arms in the order in which they run: each round has its own sessions, and arms to compare follow each
    other."""
    choices = itertools.product(range(rounds), kv, placements, policies)
    return [
        replace(case, kv=share, placement=placement, policy=policy, seed=case.seed + number)
        for number, share, placement, policy in choices
    ]


def write_checkpoint(demo: Path, directory: Path) -> None:
    """Write what an engine needs of a checkpoint of the demo model's size with a context of 262,144 tokens. It has no
    weights: the timed worker reads none, and the model gets random ones."""
    config = json.loads((demo / "config.json").read_text()) | {"max_position_embeddings": _CONTEXT}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((demo / "tokenizer_config.json").read_text()) | {"model_max_length": _CONTEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(demo / name, directory / name)


def mesh_options(model: Path, case: AgentsCase, tokens: "HeldTokens", offload: Path) -> MeshOptions:
    """Run one part of each service around ``case.engines`` engines that share the KV blocks evenly."""
    blocks = max(case.kv * tokens.all_sessions / case.engines, 1.25 * tokens.longest_prompt) / _BLOCK
    engine: dict[str, object] = {"worker": case.worker, "num-kv-blocks": round(blocks)}
    if case.worker is AgentWorker.TIMED:
        engine |= {
            "hash-step-seconds": case.step_ms / 1e3,
            "hash-token-seconds": 1 / (case.prefill_rate * case.time_scale),
            "max-num-batched-tokens": 8192,
            "prefill-tokens-beside-decode": 8192,
        }
    else:
        engine["load-format"] = "dummy"
    if case.offload:
        engine |= {"kv-offload-path": offload, "kv-offload-bytes": _OFFLOAD_BYTES}
    if case.policy is Policy.SHARED:
        engine |= {"kv-store": (offload / "shared").as_uri(), "kv-store-bytes": _OFFLOAD_BYTES}
    flags = tuple(text for name, value in engine.items() for text in (f"--{name}", str(value)))
    return MeshOptions(
        model=model,
        served_model_name=_NAME,
        engines=case.engines,
        port=0,
        drain_timeout=5.0,
        flags={
            "engine": flags,
            "coordinator": ("--placement", case.placement, *_NO_SESSIONS[case.policy]),
            # Requests wait as long as the load makes them: a refused one would end its session.
            "gateway": ("--max-queue-seconds", "600", "--always-queued", str(8 * case.sessions)),
        },
        common_flags=("--log-level", "warning"),
    )


@dataclass(frozen=True)
class HeldTokens:
    """Says how much KV the sessions need.

    Attributes:
        all_sessions: Tokens of all main lines at their mean length.
        longest_prompt: Tokens of the longest prompt.
    """

    all_sessions: float
    longest_prompt: float

    @classmethod
    def of(cls, sessions: list[AgentSession], tokenizer: Tokenizer) -> "HeldTokens":
        """Estimate the tokens from the lengths of the texts."""
        sample = sessions[0].line.project
        per_character = len(tokenizer.encode(sample, add_special_tokens=False).ids) / len(sample)
        lengths = [
            [per_character * _characters(session.line, turn) for turn in session.line.turns] for session in sessions
        ]
        return cls(sum(sum(each) / len(each) for each in lengths), max(map(max, lengths)))


def _characters(line: Line, turn: Turn) -> int:
    before = len(line.instructions) + len(line.project) + len(json.dumps(line.tools))
    return before + sum(message.length for message in turn.messages)


async def run_case(
    demo: Path, case: AgentsCase, on_start: Callable[[int], Callable[[Outcome], None]]
) -> dict[str, Any]:
    """Start a mesh, replay the sessions and stop it. ``on_start`` maps the number of requests to a callback for each
    end. Raises ``MeshBroke``."""
    tokenizer = load_tokenizer(demo)
    sessions = case.make_sessions(tokenizer)
    count = sum(len(line.turns) for session in sessions for line in session.lines())
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tl-agents-") as folder:
        model, offload = Path(folder) / "model", Path(folder) / "offload"
        model.mkdir()
        offload.mkdir()
        write_checkpoint(demo, model)

        async def work(mesh: Mesh) -> None:
            cpu, load = machine.ServiceCpu(pids_by_service(mesh)), machine.Load()
            replay = Replay(case, tokenizer, http_url(mesh), on_start(count))
            seconds = await replay.run(sessions)
            report.update(summarize(case.title, replay.records, seconds))
            report.update(case=_case_members(case), cpu_seconds=cpu.used(), **load.cores())

        await with_mesh(mesh_options(model, case, HeldTokens.of(sessions, tokenizer), offload), work)
    return report


def _case_members(case: AgentsCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


class Replay:
    """Sends the requests of all sessions at their times.

    Attributes:
        records: What was sent, in the order in which the requests began.
    """

    def __init__(self, case: AgentsCase, tokenizer: Tokenizer, base_url: str, on_done: Done) -> None:
        self.records: list[TurnRecord] = []
        self._case = case
        self._tokenizer = tokenizer
        self._endpoint = Endpoint.of(base_url, "/")
        self._on_done = on_done
        self._sender = Sender()
        self._by_turn: dict[Turn, TurnRecord] = {}
        self._began = 0.0

    async def run(self, sessions: list[AgentSession]) -> float:
        """Replay the sessions side by side; returns the seconds until all have ended."""
        self._began = time.perf_counter()
        async with self._sender, asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._session(session))
        return time.perf_counter() - self._began

    async def _session(self, session: AgentSession) -> None:
        await asyncio.sleep(session.start / self._case.time_scale)
        await self._line(session.client, session.line)

    async def _line(self, client: AgentClient, line: Line) -> None:
        """Send a line's requests one after the other; a failed one ends it."""
        for number, turn in enumerate(line.turns, 1):
            if turn.sub_agents:
                async with asyncio.TaskGroup() as group:
                    for sub in turn.sub_agents:
                        group.create_task(self._line(client, sub))
            await asyncio.sleep(turn.gap / self._case.time_scale)
            if (await self._turn(client, line, number, turn)).error:
                return

    async def _turn(self, client: AgentClient, line: Line, number: int, turn: Turn) -> Outcome:
        record = TurnRecord(client, number, is_sub_agent=bool(line.parent), is_branch=turn.is_branch)
        record.past = self._by_turn.get(turn.past) if turn.past is not None else None
        if turn.past is not None:
            record.dropped = self._dropped(turn.past.messages[turn.shared :])
        self.records.append(record)
        answer = max(_LEAST_ANSWER, round(turn.answer_tokens / self._case.time_scale))
        request = request_of(client, _NAME, line, turn, answer)
        endpoint = replace(self._endpoint, path=request.path, headers=request.headers)
        await self._sender.send(endpoint, request.body, record.outcome, self._began)
        if not record.outcome.error:
            self._by_turn[turn] = record
        self._on_done(record.outcome)
        return record.outcome

    def _dropped(self, messages: tuple[Message, ...]) -> int:
        """Return about how many tokens of an earlier prompt the new one leaves out; 0 if it goes on from its end."""
        if not messages:
            return 0
        texts = [message.text + "".join(call.arguments for call in message.calls) for message in messages]
        counts = (len(each.ids) for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return sum(counts) + _MESSAGE_TOKENS * (len(messages) + 1)
