"""``python -m tests.soak.moves``: requests of every kind move from engine to engine three times while they generate.

Each request is sent twice: first it stays on its engines, then each of its outputs moves three times, each time after a
random number of tokens. Both answers must be equal: token ids, text, reasons, calls of tools, and log probabilities.
Where nothing generates (tokens, embeddings, ranks), or for less time than a move takes (beams), the answers are
compared all the same. At the end no engine holds anything.

The pause of a move is the time between the last token of one engine and the first one of the other, in the output
processor. It is printed beside the time between two tokens of one engine.

Finished rounds are lines of ``--results``: a command that was interrupted goes on with the others.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.chaos.clients.answer import Answer, Progress
from benchmarks.chaos.clients.comparison import difference
from benchmarks.chaos.clients.exchange import ChaosClient, Exchange
from benchmarks.chaos.clients.failure import RequestFailed
from benchmarks.chaos.clients.grpc_client import GrpcClient, SessionClient
from benchmarks.chaos.clients.mix import FEATURES, Case, make_cases, with_new_grammar
from benchmarks.chaos.clients.openai_clients import PlainClient
from benchmarks.chaos.clients.other_calls import ADAPTER, other_cases
from benchmarks.chaos.clients.upload_clients import BatchClient
from tests.mesh.harness import MODEL, VOCAB_SIZE
from tests.mesh.split import SplitEngine, SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.engine_core.data.request import Request
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.model_files.model_path import DEMO_ADAPTERS, DEMO_MODEL
from tokenloom.services.engine.records.attempt import Attempt
from tokenloom.services.output_processor.request.request_stages import RequestStages
from tokenloom.v1.engine_pb2 import MoveRequestsRequest, ResetPrefixCacheRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

MOVES = 3
"""Of each output."""
LENGTHS = (100, 140)
"""Bounds of the tokens of an answer that nothing else ends: three moves fit, with room between."""
_MOVE_TOKENS = 20
"""An output goes on for about so many tokens while it moves."""
_LONGEST_WAIT = 40
"""Tokens before a move at most: an answer may end long before its limit."""
_STEP_SECONDS = 0.01
_PAUSE_MILLISECONDS = 10.0
"""By which a pause may exceed a step, on a machine that has time for all of the mesh."""
_TIMEOUT = 180.0
_LOOK_SECONDS = 0.002
_TOLERANCE = {"hash": 0.0, "model": 1e-4}
"""Of log probabilities: a step with other neighbours rounds differently."""
ROLES = {"whole": ("both",) * 3, "split": ("prefill", "decode", "decode")}
_TEXTS = frozenset({"prompt", "content", "input", "turns", "lines"})
"""Fields of requests that become prompts."""


@dataclass
class Round:
    """What happened to one request of each kind.

    Attributes:
        number: Of the round.
        requests: How many were sent.
        moves: How many outputs moved so many times, by kind.
        reasons: Why outputs stayed, and how often.
        pauses, steps: Milliseconds between tokens of two engines, and of one.
        wrong: What differed.
    """

    number: int
    requests: int = 0
    moves: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def num_moves(self) -> int:
        """Moves of all outputs."""
        return sum(int(times) * count for each in self.moves.values() for times, count in each.items())


class Mover:
    """Moves each output three times while :meth:`running` lasts, each time after a random number of its tokens.

    Attributes:
        moved: How often outputs have moved, by the id that the samples of a request share.
        sizes: How many outputs have that id.
        kinds: Of the outputs, by their ids.
    """

    def __init__(self, mesh: SplitMesh, cases: Sequence[Case], rng: random.Random, reasons: Counter[str]) -> None:
        """``reasons``: counts why outputs stayed."""
        self.moved: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self.kinds: dict[str, str] = {}
        self._mesh = mesh
        self._cases = cases
        self._rng = rng
        self._reasons = reasons
        self._due: dict[str, int] = {}  # the number of its tokens after which an output moves
        self._calls: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Move outputs while the body runs."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.wait([watch, *self._calls.values()])
        for call in self._calls.values():
            call.result()

    async def _watch(self) -> None:
        while True:
            services: Any = [engine.service for engine in self._mesh.engines]
            running = [service.engine.core.movable("") for service in services]
            self.sizes |= Counter(attempt.request_id for attempts in running for attempt in attempts)
            for engine, attempts in zip(self._mesh.engines, running, strict=True):
                for attempt in attempts:
                    self._look(engine, attempt)
            await asyncio.sleep(_LOOK_SECONDS)

    def _look(self, engine: SplitEngine, attempt: Attempt) -> None:
        """Move an attempt if it has the tokens after which it is to."""
        name, num_tokens = attempt.request_id, attempt.tokens.output
        is_moving = name in self._calls and not self._calls[name].done()
        request = engine.core.scheduler.requests.get(attempt.key)
        if is_moving or not num_tokens or request is None or self.times(name) == MOVES:
            return
        if name not in self.kinds:
            self.kinds[name] = self._kind(request)
        if name not in self._due:
            room = (request.max_num_tokens - request.num_tokens) // (MOVES - self.times(name)) - _MOVE_TOKENS
            self._due[name] = num_tokens + self._rng.randint(0, min(max(room, 0), _LONGEST_WAIT))
        if num_tokens >= self._due[name]:
            del self._due[name]
            if name in self._calls:
                self._calls[name].result()
            self._calls[name] = asyncio.create_task(self._move(engine, name))

    def times(self, name: str) -> int:
        """Return how often each output of an id has moved."""
        return self.moved[name] // self.sizes[name]

    async def _move(self, engine: SplitEngine, name: str) -> None:
        async with ready_channel(self._mesh.address(engine.name)) as channel:
            answer = await EngineAdminStub(channel).MoveRequests(MoveRequestsRequest(request_id=name))
        self.moved[name] += answer.moved
        self._reasons.update(answer.reasons)

    def _kind(self, request: Request) -> str:
        """Return the name of the case whose mark the prompt has."""
        ids = request.prompt_token_ids
        if request.kv.prompt_embeds:
            return "prompt embeddings"
        text = self._mesh.tokenizer.decode(ids, skip_special_tokens=False)
        return next((case.name for case in self._cases if case.prompt == ids or _mark(case.name) in text), "unknown")


def _is_close(one: Answer, other: Answer, tolerance: float) -> bool:
    """Return whether two answers of JSON are equal but for numbers that differ by ``tolerance`` at most."""

    def same(value: Any, found: Any) -> bool:
        if isinstance(value, float) and isinstance(found, float):
            return abs(value - found) <= tolerance
        if isinstance(value, dict) and isinstance(found, dict):
            return value.keys() == found.keys() and all(same(value[name], found[name]) for name in value)
        if isinstance(value, list) and isinstance(found, list):
            return len(value) == len(found) and all(map(same, value, found))
        return bool(value == found)

    return same(json.loads(one.sample(0).text), json.loads(other.sample(0).text))


def marked(value: Any, name: str, *, is_text: bool = False) -> Any:
    """Return a request whose prompts end with the name of its kind."""
    if isinstance(value, dict):
        return {key: marked(each, name, is_text=key in _TEXTS) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(each, name, is_text=is_text) for each in value]
    return value + _mark(name) if is_text and isinstance(value, str) else value


def _mark(name: str) -> str:
    return f" [{name}]"


@contextmanager
def timed(found: Round) -> Iterator[None]:
    """Note the time between two tokens of each output."""
    last: dict[int, tuple[RequestStages, int, Any, float]] = {}
    take = RequestStages.on_tokens

    def on_tokens(stages: RequestStages, attempt: Any, *tokens: Any) -> None:
        now, num_moves = time.monotonic(), stages._output.timeline.moves
        if (before := last.get(id(stages))) is not None and before[0] is stages:
            milliseconds = round((now - before[3]) * 1e3, 1)
            if num_moves > before[1]:
                found.pauses.append(milliseconds)
            elif attempt is before[2]:
                found.steps.append(milliseconds)
        last[id(stages)] = stages, num_moves, attempt, now
        take(stages, attempt, *tokens)

    with patch.object(RequestStages, "on_tokens", on_tokens):
        yield


class Campaign:
    """Sends requests to one mesh."""

    def __init__(self, mesh: SplitMesh, worker: str, seed: int) -> None:
        self._mesh = mesh
        self._tolerance = _TOLERANCE[worker]
        self._seed = seed
        hidden_size = json.loads((DEMO_MODEL / "config.json").read_text())["hidden_size"]
        self._hidden_size = HIDDEN_SIZE if worker == "hash" else int(hidden_size)
        http, grpc = mesh.url.partition("://")[2], mesh.gateway.settings.listen
        self._clients: dict[str, ChaosClient] = {
            "plain HTTP": PlainClient([http], MODEL),
            "gRPC client": GrpcClient([grpc]),
            "gRPC session": SessionClient([grpc]),
            "batch": BatchClient([http], MODEL),
        }

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def run(self, number: int) -> Round:
        """Send one request of each kind while it stays, and again while it moves."""
        rng, found = random.Random(f"moves {self._seed} {number}"), Round(number)
        cases = self._cases(rng)
        found.requests = len(cases)
        still = await asyncio.gather(*(self._answer(case, number + at) for at, case in enumerate(cases)))
        await self._forget()
        mover = Mover(self._mesh, cases, rng, found.reasons)
        async with mover.running():
            with timed(found):
                moved = await asyncio.gather(*(self._answer(case, number + at) for at, case in enumerate(cases)))
        for case, one, other in zip(cases, still, moved, strict=True):
            if isinstance(one, str) or isinstance(other, str):
                found.wrong.append(f"round {number}, {case.name}: {one!r:.200}; moved: {other!r:.200}")
            elif case.call is not None and case.client == "plain HTTP" and _is_close(one, other, self._tolerance):
                continue  # embeddings and ranks, too, are rounded differently
            elif (text := difference(one, other, self._tolerance)) is not None:
                found.wrong.append(f"round {number}, {case.name}: {text}")
        for name, kind in mover.kinds.items():
            counts = found.moves.setdefault(kind.rstrip("0123456789").rstrip(), Counter())
            counts[str(mover.times(name))] += mover.sizes[name]
        await self._forget()
        return found

    def _cases(self, rng: random.Random) -> list[Case]:
        cases = make_cases(rng, VOCAB_SIZE, LENGTHS, len(FEATURES))
        cases += other_cases(rng, VOCAB_SIZE, self._hidden_size, rng.randint(*LENGTHS))
        return [
            replace(
                case,
                prompt=marked(case.prompt, case.name, is_text=True),
                messages=marked(case.messages, case.name),
                options=marked(case.options, case.name),
            )
            for case in cases
        ]

    async def _answer(self, case: Case, number: int) -> Answer | str:
        """Return the answer, or why there is none. ``number`` chooses the client."""
        client = self._clients[case.client or ("plain HTTP", "gRPC client")[number % 2]]
        exchange = Exchange(number, with_new_grammar(case, number), 0, Progress(time.monotonic()), _TIMEOUT)
        try:
            async with asyncio.timeout(_TIMEOUT):
                await client.send(exchange)
        except (RequestFailed, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return exchange.answer

    async def _forget(self) -> None:
        """Check that no engine holds anything, and empty their caches, which have much of what would move."""
        await self._mesh.check_nothing_is_left()
        for engine in self._mesh.engines:
            async with ready_channel(self._mesh.address(engine.name)) as channel:
                await EngineAdminStub(channel).ResetPrefixCache(ResetPrefixCacheRequest())


@asynccontextmanager
async def campaign(
    directory: Path,
    worker: str = "hash",
    layout: str = "whole",
    *,
    drafts: int = 0,
    overlaps: bool = False,
    seed: int = 0,
) -> AsyncIterator[Campaign]:
    """Run a mesh. ``layout``: a key of ``ROLES``. ``drafts``: of each step. ``overlaps``: whether steps do."""
    settings: dict[str, Any] = {
        "worker": worker,
        "max_model_len": 1024,
        "num_kv_blocks": 2048,
        "max_num_seqs": 64,
        "enable_prompt_embeds": True,
        "scheduling_policy": "priority",
        "enable_lora": True,
        "lora_modules": (f"{ADAPTER}={DEMO_ADAPTERS / ADAPTER}",),
        "async_scheduling": overlaps,
    }
    if worker == "hash":
        settings["hash_step_seconds"] = _STEP_SECONDS
    if drafts:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
    batches = directory / "batches"
    batches.mkdir(exist_ok=True)
    mesh = SplitMesh(directory, ROLES[layout], engine=settings, gateway={"batch_dir": batches})
    async with mesh.running():
        made = Campaign(mesh, worker, seed)
        try:
            yield made
        finally:
            await made.close()


async def _run(arguments: argparse.Namespace, directory: Path, done: list[Round]) -> None:
    missing = sorted({*range(arguments.rounds)} - {each.number for each in done})
    options = {"drafts": arguments.drafts, "overlaps": arguments.async_scheduling, "seed": arguments.seed}
    async with campaign(directory, arguments.worker, arguments.layout, **options) as made:
        for number in missing:
            started = time.monotonic()
            found = await made.run(number)
            done.append(found)
            with arguments.results.open("a") as file:
                file.write(json.dumps(vars(found)) + "\n")
            seconds = time.monotonic() - started
            print(f"round {number}: {found.requests} requests, {found.num_moves} moves, {seconds:.0f} s", flush=True)
            for text in found.wrong:
                print(f"  ! {text}", flush=True)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def report(done: Sequence[Round]) -> int:
    """Print what happened in all rounds. Returns 1 if an answer was wrong."""
    moves: dict[str, Counter[str]] = {}
    for each in done:
        for kind, counts in each.moves.items():
            moves.setdefault(kind, Counter()).update(counts)
    print(f"{'kind':24} outputs by their moves: 0, 1, 2, 3")
    for kind, counts in sorted(moves.items()):
        print(f"{kind:24}", *(f"{counts[str(times)]:5}" for times in range(MOVES + 1)))
    reasons = sum((Counter(each.reasons) for each in done), Counter[str]())
    print(*(f"{count:5} stayed: {reason}" for reason, count in reasons.most_common()), sep="\n")
    pauses = [each for found in done for each in found.pauses]
    steps = [each for found in done for each in found.steps]
    for name, values in (("pause of a move", pauses), ("between two tokens of one engine", steps)):
        p50, p99 = _percentile(values, 0.5), _percentile(values, 0.99)
        print(f"{name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(values)}")
    step = _percentile(steps, 0.5)
    within = sum(value - step <= step + _PAUSE_MILLISECONDS for value in pauses)
    print(f"{within} of {len(pauses)} are longer than a step of {step:g} ms by a step and 10 ms at most")
    wrong = [text for each in done for text in each.wrong]
    num_requests, num_moves = sum(each.requests for each in done), sum(each.num_moves for each in done)
    print(f"{num_requests} requests, {num_moves} moves, {len(wrong)} wrong or failed; no engine holds anything")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.moves", description=__doc__)
    parser.add_argument("--rounds", type=int, default=32, help="of one request of each kind (32: 1,000 requests)")
    parser.add_argument("--worker", choices=_TOLERANCE, default="hash", help="model: the demo model in float32")
    parser.add_argument("--layout", choices=ROLES, default="whole", help="split: one prefill and two decode engines")
    parser.add_argument("--drafts", type=int, default=0, help="of each step (0)")
    parser.add_argument("--async-scheduling", action="store_true", help="overlap the steps of every engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=None, help="finished rounds; by default none is kept")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as name:
        if arguments.results is None:
            arguments.results = Path(name) / "results"
        lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
        done = [Round(**json.loads(line)) for line in lines]
        asyncio.run(_run(arguments, Path(name), done))
    return report(done)


if __name__ == "__main__":
    sys.exit(main())
