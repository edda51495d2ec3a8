"""Runs requests through any sequence of events: each ends once with exact tokens, and no engine keeps anything."""

import random
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.output_processor.fakes import submit
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import Unavailable
from tokenloom.services.output_processor.placement.engine_link import AttemptOwner, EngineAttempt
from tokenloom.services.output_processor.placement.engine_search import MAX_ENGINE_DEATHS, EngineSearch, Lifetime
from tokenloom.services.output_processor.placement.last_snapshot import EngineKey
from tokenloom.services.output_processor.request.outbox import Outbox
from tokenloom.services.output_processor.request.request_stages import RequestStages
from tokenloom.services.output_processor.request.sample_output import SampleOutput
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.runtime.peers.retry_budget import RetryBudget
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVGrant, KVSource
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import EngineRole, FinishReason

SELDOM = st.integers(0, 19).map(lambda value: value == 13)
"""For what cuts a life short: most should get far."""
OFTEN = st.integers(0, 4).map(lambda value: value == 3)
"""For what a life survives."""
TEXT = "Once upon a time there was a little fox that was red"
STOP_STRINGS = ["", "O", "upon", "there"]
ERROR, PREFILLED = FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_PREFILLED
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH


@cache
def vocabulary() -> tuple[Vocabulary, list[int]]:
    tokenizer = load_tokenizer(DEMO_MODEL)
    return Vocabulary(tokenizer), tokenizer.encode(TEXT, add_special_tokens=False).ids


class Sent:
    """An Add as its engine sees it."""

    def __init__(self, engine: "Engine", add: AddRequest, attempt: EngineAttempt) -> None:
        self.engine, self.add, self.attempt = engine, add, attempt
        self.awaits = add.awaits_tokens
        self.granted = False
        self.num_tokens = len(add.accepted_token_ids)
        self.stop_at: int | None = None
        self.moves_at: int | None = None
        self.is_to_stay = False

    @property
    def is_live(self) -> bool:
        return self.engine.live.get(self.add.slot) is self


class Engine:
    """One incarnation, and the link to it."""

    fell_silent = may_compute = False
    moves_requests = True

    def __init__(self, number: int) -> None:
        self.identity = EngineIdentity(engine_id=f"engine-{number}", epoch=number)
        self.serves = self.identity.fingerprint
        self.key = EngineKey(f"engine-{number}", number)
        self.dead = False
        self.live: dict[int, Sent] = {}
        self.leases: set[int] = set()
        self.last_slot = 0

    def add(self, request: AddRequest, attempt: EngineAttempt, owner: AttemptOwner) -> None:
        if self.dead:
            raise Unavailable("dead")
        assert not request.HasField("kv_source") or request.kv_source.engine_epoch != self.identity.epoch
        self.last_slot += 1
        request.slot = attempt.slot = self.last_slot
        attempt.owner = owner
        self.live[self.last_slot] = Sent(self, request, attempt)

    def accept(self, attempt: EngineAttempt, token_ids: Sequence[int]) -> None:
        if (sent := self.live.get(attempt.slot)) is not None:
            assert sent.awaits
            assert len(token_ids) > 0
            sent.awaits = False
            sent.add.accepted_token_ids.extend(token_ids)
            sent.num_tokens += len(token_ids)

    def stop_at(self, attempt: EngineAttempt, num_tokens: int) -> None:
        if (sent := self.live.get(attempt.slot)) is not None:
            sent.stop_at = num_tokens

    def keep(self, attempt: EngineAttempt) -> None:
        if (sent := self.live.get(attempt.slot)) is not None:
            sent.is_to_stay = True

    def abort(self, attempt: EngineAttempt) -> None:
        if self.live.pop(attempt.slot, None) is not None:
            self.leases.discard(attempt.slot)

    def drop_kv(self, attempt: EngineAttempt) -> None:
        assert attempt.slot not in self.live
        self.leases.discard(attempt.slot)

    def finish(self, sent: Sent, reason: FinishReason, **fields: Any) -> None:
        num_tokens = sent.num_tokens if sent.stop_at is None else sent.stop_at
        finished = Finished(slot=sent.add.slot, reason=reason, num_output_tokens=num_tokens, **fields)
        del self.live[sent.add.slot]
        if reason != PREFILLED:
            self.leases.discard(sent.add.slot)
        sent.attempt.owner.on_finished(sent.attempt, finished)

    def die(self, *, is_alone: bool) -> None:
        self.dead = True
        self.leases.clear()
        live, self.live = self.live, {}
        for sent in live.values():
            sent.attempt.owner.on_lost(sent.attempt, is_alone=is_alone)


class Later:
    """Awaited until the test decides."""

    def __init__(self) -> None:
        self.result: EngineAttempt | Exception | None = None

    def __await__(self) -> Generator[None, None, EngineAttempt]:
        while self.result is None:
            yield
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Task:
    """Runs a placement until it waits; the test resolves what it waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.coroutine = coroutine
        self.is_over = False

    def run(self) -> None:
        try:
            self.coroutine.send(None)
        except StopIteration:
            self.is_over = True

    def cancel(self) -> None:
        if not self.coroutine.cr_running:  # type: ignore[attr-defined]
            self.coroutine.close()
            self.is_over = True


class Placements:
    """The placer and the tasks that wait for it."""

    def __init__(self) -> None:
        self.budget = RetryBudget(lambda: 0.0)
        self.waiting: list[tuple[EngineRole, Later]] = []
        self.tasks: list[Task] = []
        self.num_out = 0

    def at_once(self, _: object) -> None:
        return None

    async def place(self, request: object, role: EngineRole, search: EngineSearch, **_: object) -> EngineAttempt:
        later = Later()
        entry = role, later
        self.waiting.append(entry)
        try:
            return await later
        finally:
            if entry in self.waiting:  # it was cancelled
                self.waiting.remove(entry)

    async def place_move(self, request: object, source: EngineKey, target: str, **_: object) -> EngineAttempt:
        assert target == "engine-9"
        attempt = await self.place(request, EngineRole.ENGINE_ROLE_DECODE, None)  # type: ignore[arg-type]
        if attempt.link.key == source:
            self.release(attempt)
            raise Unavailable("it is to leave this engine")
        return attempt

    def release(self, attempt: EngineAttempt) -> None:
        if attempt.is_counted:
            attempt.is_counted = False
            self.num_out -= 1

    def is_shared(self, key: EngineKey, num_samples: int) -> bool:
        return False

    def is_open(self, key: EngineKey) -> bool:
        return False

    def check(self, link: Engine, found: Callable[[bool], None]) -> None:
        found(not link.dead)

    def spawn(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> Task:
        task = Task(coroutine)
        self.tasks.append(task)
        self.run()
        return task

    def resolve(self, index: int, result: EngineAttempt | Exception) -> None:
        _, later = self.waiting.pop(index)
        later.result = result
        self.num_out += isinstance(result, EngineAttempt)
        self.run()

    def run(self) -> None:
        """Let every task that is not already running take a turn."""
        for task in list(self.tasks):
            if not task.is_over and not task.coroutine.cr_running:  # type: ignore[attr-defined]
                task.run()
        self.tasks = [task for task in self.tasks if not task.is_over]


class LegsMachine(RuleBasedStateMachine):
    """One request after another, each with engines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[Engine] = []
        self.by_epoch: dict[int, Engine] = {}
        self.placements = Placements()

    @precondition(lambda self: not hasattr(self, "live") or self.live.ended)
    @rule(stop=st.sampled_from(STOP_STRINGS), max_tokens=st.integers(1, 11))
    def begin(self, stop: str, max_tokens: int) -> None:
        self.teardown()  # of the request before
        words, self.ids = vocabulary()
        self.max_tokens = max_tokens
        self.by_epoch = {number: Engine(number) for number in range(1, 5)}
        self.engines = list(self.by_epoch.values())
        self.num_blamed = 0
        self.placements = Placements()
        self.outbox = Outbox(lambda: None)
        self.sent: list[int] = []
        self.ends: list[RequestFinished] = []
        request = submit(1, max_tokens=max_tokens, stop=[stop] if stop else [])
        output = SampleOutput(request, words, frozenset(), self.outbox)
        placer = tasks = self.placements
        self.live = RequestStages(
            request,
            request.sampling_params,
            output,
            placer,  # type: ignore[arg-type]
            tasks,  # type: ignore[arg-type]
            lambda live, end: self.ends.append(end),
            Lifetime(request, 0.0),
        )
        self.live.start()

    @property
    def attempts(self) -> list[Sent]:
        return [sent for engine in self.engines for sent in engine.live.values()]

    # Placement

    @precondition(lambda self: self.placements.waiting)
    @rule(index=st.integers(0, 3), whole=st.booleans(), number=st.integers(0, 3))
    def place(self, index: int, whole: bool, number: int) -> None:
        index %= len(self.placements.waiting)
        role, _ = self.placements.waiting[index]
        whole = whole and role != EngineRole.ENGINE_ROLE_DECODE
        placement = EngineAttempt(self.engines[number], None, whole, is_counted=True)  # type: ignore[arg-type]
        self.placements.resolve(index, placement)

    @precondition(lambda self: self.placements.waiting)
    @rule(now=SELDOM)
    def fail_to_place(self, now: bool) -> None:
        if now:
            self.placements.resolve(0, Unavailable("no engine"))

    # Engines

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3))
    def grant(self, index: int) -> None:
        sent = self.attempts[index % len(self.attempts)]
        if sent.add.hold_kv and not sent.granted and sent.num_tokens == len(sent.add.accepted_token_ids):
            sent.granted = True
            sent.engine.leases.add(sent.add.slot)
            sent.attempt.owner.on_kv_granted(sent.attempt, self.kv(sent))

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), ends_now=st.booleans())
    def step(self, index: int, ends_now: bool) -> None:
        """One token, or what ends the attempt; ``ends_now``: in the frame of its token."""
        sent = self.attempts[index % len(self.attempts)]
        if sent.awaits:
            return
        has_token = sent.num_tokens > len(sent.add.accepted_token_ids)
        is_prefilled = (sent.add.hold_kv and has_token) or sent.num_tokens == sent.moves_at
        if sent.num_tokens < self.max_tokens and sent.stop_at is None and not is_prefilled:
            self.send_token(sent)
            if not ends_now:
                return
        if not sent.is_live:
            return
        if sent.stop_at is not None:
            sent.engine.finish(sent, STOP)
        elif sent.num_tokens >= self.max_tokens:
            sent.engine.finish(sent, LENGTH)
        elif sent.add.hold_kv or sent.num_tokens == sent.moves_at:
            sent.engine.leases.add(sent.add.slot)
            sent.engine.finish(sent, PREFILLED, kv=self.kv(sent))

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), more=st.integers(1, 3), early=SELDOM)
    def move(self, index: int, more: int, early: bool) -> None:
        """An engine hands over an attempt that runs, after some more tokens. ``early``: before it has brought any."""
        sent = self.attempts[index % len(self.attempts)]
        if sent.awaits or sent.add.hold_kv or sent.moves_at is not None or sent.stop_at is not None:
            return
        if not sent.attempt.has_output and not early:
            self.step(index, False)
            return
        if sent.num_tokens + more < self.max_tokens:
            sent.moves_at, sent.is_to_stay = sent.num_tokens + more, False
            sent.engine.leases.add(sent.add.slot)
            grant = KVGrant(slot=sent.add.slot, kv=self.kv(sent), moves=True, target="engine-9")
            sent.attempt.owner.on_moving(sent.attempt, grant)

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), is_preempted=SELDOM)
    def stay(self, index: int, is_preempted: bool) -> None:
        """An engine hears that an attempt is to stay, or loses its blocks."""
        sent = self.attempts[index % len(self.attempts)]
        if sent.moves_at is not None and (sent.is_to_stay or is_preempted):
            sent.moves_at = None
            sent.engine.leases.discard(sent.add.slot)
            sent.attempt.owner.on_moving(sent.attempt, KVGrant(slot=sent.add.slot, moves=True))

    def send_token(self, sent: Sent) -> None:
        index = sent.num_tokens
        assert list(sent.add.accepted_token_ids) == self.ids[: len(sent.add.accepted_token_ids)]
        sent.num_tokens += 1
        if sent.add.HasField("kv_source"):  # was read, and is released
            owner = self.by_epoch[sent.add.kv_source.engine_epoch]
            owner.leases.discard(sent.add.kv_source.lease_id[0])
        sent.attempt.owner.on_tokens(sent.attempt, index, self.ids[index : index + 1], None)

    def kv(self, sent: Sent) -> KVSource:
        epoch = sent.engine.identity.epoch
        return KVSource(engine_id=f"engine-{epoch}", engine_epoch=epoch, lease_id=bytes([sent.add.slot]))

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), now=OFTEN, is_alone=SELDOM)
    def die(self, index: int, now: bool, is_alone: bool) -> None:
        """An engine dies with or without output, and another incarnation takes its place."""
        if now:
            engine = self.attempts[index % len(self.attempts)].engine
            number = max(self.by_epoch) + 1
            self.by_epoch[number] = self.engines[self.engines.index(engine)] = Engine(number)
            self.num_blamed += is_alone
            engine.die(is_alone=is_alone)

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), now=OFTEN, reason=st.sampled_from(["TRY_ELSEWHERE", "TRY_ELSEWHERE", "ENGINE_DIED"]))
    def leave(self, index: int, now: bool, reason: str) -> None:
        """An engine ends an attempt because it drains, or because its core died."""
        if now:
            sent = self.attempts[index % len(self.attempts)]
            self.num_blamed += reason == "ENGINE_DIED"
            sent.engine.finish(sent, ERROR, error={"code": 14, "reason": reason, "message": "the engine leaves"})

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), now=OFTEN)
    def be_full(self, index: int, now: bool) -> None:
        """An engine refuses an attempt that it has not begun."""
        if now:
            sent = self.attempts[index % len(self.attempts)]
            if sent.num_tokens == len(sent.add.accepted_token_ids) and not sent.granted:
                sent.engine.finish(sent, ERROR, error={"code": 8, "reason": "RESOURCE_EXHAUSTED", "message": "full"})

    @precondition(lambda self: self.attempts)
    @rule(index=st.integers(0, 3), now=SELDOM)
    def refuse(self, index: int, now: bool) -> None:
        """An engine refuses a request that every engine would refuse."""
        if now:
            sent = self.attempts[index % len(self.attempts)]
            runs_elsewhere = any(other.moves_at is not None for other in self.attempts if other is not sent)
            sent.engine.finish(sent, ERROR, error={"code": 3, "reason": "INVALID_ARGUMENT", "message": "no"})
            assert self.live.ended != (sent.awaits and runs_elsewhere)

    @precondition(lambda self: hasattr(self, "live") and not self.live.ended)
    @rule(now=SELDOM)
    def cancel(self, now: bool) -> None:
        if now:
            self.live.cancel()

    # What must hold

    @invariant()
    def tokens_are_exact_and_the_end_is_one(self) -> None:
        if not hasattr(self, "live"):
            return
        if self.outbox:
            frame = self.outbox.take()
            self.sent += frame.token_ids
        assert self.sent == self.ids[: len(self.sent)]
        assert len(self.ends) == self.live.ended
        if self.live.ended and self.ends[0].HasField("error"):
            reason = self.ends[0].error.reason
            assert reason in ("ENGINE_KILLER", "INVALID_ARGUMENT", "UNAVAILABLE"), "nothing failed by itself"
            assert reason != "ENGINE_KILLER" or self.num_blamed >= MAX_ENGINE_DEATHS
        if self.live.ended:
            assert self.ends[0].completion_tokens == len(self.sent)
            self.check_freed()
        else:
            assert self.attempts or self.placements.waiting, "an engine or a placement works for it"
            assert sum(not sent.awaits for sent in self.attempts) <= 1, "one engine generates"

    def check_freed(self) -> None:
        assert not self.attempts
        assert not any(engine.leases for engine in self.engines)
        assert self.placements.num_out == 0

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.live.cancel()
            assert not self.placements.waiting, "nothing waits for an engine any more"
            self.check_freed()


TestLegs = LegsMachine.TestCase
TestLegs.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_outputs_move_there_and_back() -> None:
    """The machine's rules in the proportion in which moves get far: most requests move several times, through losses of
    either engine at any message."""
    num_moves = num_full = 0
    for seed in range(400):
        draw, machine = random.Random(seed), LegsMachine()
        machine.begin(stop=draw.choice(["", "", "there"]), max_tokens=draw.randint(6, 11))
        for _ in range(500):
            if machine.live.ended:
                break
            live = machine.live._output
            act(machine, draw)
            machine.tokens_are_exact_and_the_end_is_one()
        assert machine.live.ended
        num_moves += live.timeline.moves
        num_full += machine.ends[0].reason in (STOP, LENGTH)
        machine.teardown()
    assert num_moves > 400
    assert num_full > 300


def act(machine: LegsMachine, draw: random.Random) -> None:
    index, chance = draw.randrange(4), draw.random()
    if machine.placements.waiting and chance < 0.3:
        machine.place(index, whole=draw.random() < 0.8, number=draw.randrange(4))
    elif machine.placements.waiting and chance < 0.31:
        machine.placements.resolve(0, Unavailable("no engine")) if machine.live._is_moving else None
    elif not machine.attempts:
        return
    elif chance < 0.55:
        machine.move(index, draw.randint(1, 3), early=draw.random() < 0.05)
    elif chance < 0.6:
        machine.stay(index, is_preempted=draw.random() < 0.2)
    elif chance < 0.62:
        machine.die(index, now=True, is_alone=False)
    elif chance < 0.63:
        machine.leave(index, now=True, reason="TRY_ELSEWHERE")
    elif chance < 0.64:
        machine.be_full(index, now=True)
    else:
        machine.step(index, ends_now=draw.random() < 0.5)
