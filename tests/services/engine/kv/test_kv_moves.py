"""What an engine's front does with attempts that are to go on elsewhere, while their core answers or does not."""

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

from tokenloom.engine_core.data.kv_messages import ENDS_SOON
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.request.errors import FailedPrecondition, TokenloomError, TryElsewhere, Unavailable
from tokenloom.services.engine.kv.kv_front import KVMoves, counted
from tokenloom.services.engine.records.attempt import Attempt, AttemptKV, AttemptTimes, TokenCounts
from tokenloom.v1.coordinator_pb2 import Relief
from tokenloom.v1.engine_pb2 import MoveRequestsResponse


def attempt(number: int) -> Attempt:
    kv, tokens = AttemptKV(b"", False), TokenCounts(10, 2, 5)
    return Attempt(number, f"1.{number}", f"request-{number}", None, None, tokens, AttemptTimes(0.0), kv)


def end(each: Attempt, reason: FinishReason) -> None:
    each.finish_reason = reason
    each.ended()


class FakeCore:
    """Answers each call with what ``lend`` returns, or raises."""

    def __init__(self, attempts: list[Attempt], lend: Callable[[Attempt], str]) -> None:
        self.attempts = attempts
        self.lend = lend
        self.failed: list[str] = []
        self.asked: list[tuple[object, ...]] = []
        self.best: list[str] = []
        self.counted: list[str] = []
        self.metrics = SimpleNamespace(kv=SimpleNamespace(observe_move=self.counted.append))

    def movable(self, request_id: str) -> list[Attempt]:
        return [each for each in self.attempts if request_id in ("", each.request_id) and not each.kv.lease_id]

    async def call(self, method: str, *args: object) -> object:
        await asyncio.sleep(0)
        if method == "requests_to_lend":
            return self.best[: int(str(args[0]))]
        assert method == "lend_request"
        self.asked.append(args)
        return self.lend(next(each for each in self.attempts if each.key == args[0]))

    def fail(self, each: Attempt, error: TokenloomError) -> None:
        self.failed.append(each.request_id)
        end(each, FinishReason.ERROR)


async def until(holds: Callable[[], object]) -> None:
    for _ in range(100):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


def moves_of(core: FakeCore) -> KVMoves:
    return KVMoves(core, Random(0))  # type: ignore[arg-type]


async def test_an_attempt_is_lent_with_the_tokens_that_it_began_with() -> None:
    core = FakeCore([attempt(1), attempt(2)], lambda _: "")
    moving = asyncio.create_task(moves_of(core).move("request-1", "engine-1", "operator"))
    await until(lambda: core.asked)
    [(key, lease_id, num_given)] = core.asked
    one = core.attempts[0]
    assert (key, num_given) == ("1.1", 12)
    assert (one.kv.lease_id, one.kv.target) == (lease_id, "engine-1")
    await asyncio.sleep(0)
    assert not moving.done()
    end(one, FinishReason.PREFILLED)
    assert counted(await moving) == MoveRequestsResponse(moved=1)
    assert core.counted == ["operator"]


async def test_attempts_that_end_at_any_moment_are_not_waited_for() -> None:
    """Before the core is asked, while it answers, and while they are lent."""

    def lend(each: Attempt) -> str:
        if each.slot == 2:
            end(each, FinishReason.STOP)
            return "it has ended"
        return ""

    core = FakeCore([attempt(1), attempt(2), attempt(3)], lend)
    moving = asyncio.create_task(moves_of(core).move("", "", "operator"))
    end(core.attempts[0], FinishReason.ABORT)
    await until(lambda: len(core.asked) == 2)
    end(core.attempts[2], FinishReason.STOP)
    assert counted(await moving) == MoveRequestsResponse(ended=3)


async def test_what_stays_says_why() -> None:
    def lend(each: Attempt) -> str:
        if each.slot == 3:
            raise Unavailable("the engine failed")
        return "" if each.slot == 1 else ENDS_SOON

    core = FakeCore([attempt(1), attempt(2), attempt(3)], lend)
    moving = asyncio.create_task(moves_of(core).move("", "", "operator"))
    await until(lambda: len(core.asked) == 3)
    core.attempts[0].kv.stay()
    told = counted(await moving)
    assert (told.stayed, len(told.reasons)) == (3, 3)
    assert {ENDS_SOON, "the engine failed"} < set(told.reasons)
    assert all((each.kv.lease_id, each.kv.target) == (b"", None) for each in core.attempts)


async def test_an_engine_that_ends_gets_rid_of_all() -> None:
    """Of one that moves, of one that ends soon, which it waits for, and of those that cannot move."""
    causes = {1: "", 2: ENDS_SOON, 3: "it waits to run"}
    core = FakeCore([attempt(number) for number in causes], lambda each: causes[each.slot])
    leaving = asyncio.create_task(moves_of(core).leave(TryElsewhere("it ends")))
    await until(lambda: core.failed)
    assert core.failed == ["request-3"]
    end(core.attempts[1], FinishReason.LENGTH)
    assert not leaving.done()
    core.attempts[0].kv.stay()
    await leaving
    assert core.failed == ["request-3", "request-1"]


async def test_whoever_stops_waiting_leaves_nothing_half_done() -> None:
    """An attempt that stays may move again, and one that was lent is waited for by the next who asks."""
    core = FakeCore([attempt(1), attempt(2)], lambda each: "" if each.slot == 1 else "it waits to run")
    moves = moves_of(core)
    moving = asyncio.create_task(moves.move("", "", "operator"))
    await until(lambda: len(core.asked) == 2)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    lent, stays = core.attempts
    await until(lambda: not stays.kv.lease_id)
    assert core.movable("") == [stays]
    leaving = asyncio.create_task(moves.leave(TryElsewhere("it ends")))
    await until(lambda: core.failed)
    assert core.failed == ["request-2"]
    assert not leaving.done()
    end(lent, FinishReason.PREFILLED)
    await leaving


async def test_two_who_ask_at_once_lend_an_attempt_once() -> None:
    core = FakeCore([attempt(1)], lambda _: "")
    moves = moves_of(core)
    both = [asyncio.create_task(moves.move("", "", "operator")) for _ in range(2)]
    await until(lambda: core.asked)
    await asyncio.sleep(0)
    [(_, lease_id, _)] = core.asked
    assert core.attempts[0].kv.lease_id == lease_id
    end(core.attempts[0], FinishReason.PREFILLED)
    assert sorted(len(told) for told in await asyncio.gather(*both)) == [0, 1]


async def test_a_move_that_comes_during_a_drain_does_not_take_the_end_from_it() -> None:
    core = FakeCore([attempt(1)], lambda _: ENDS_SOON)
    moves = moves_of(core)
    leaving = asyncio.create_task(moves.leave(TryElsewhere("it ends")))
    await until(lambda: core.asked)
    await asyncio.sleep(0)
    with pytest.raises(FailedPrecondition, match="drains"):
        await moves.move("", "", "operator")
    moves.relieve(Relief(target="engine-1", count=1))
    end(core.attempts[0], FinishReason.LENGTH)
    async with asyncio.timeout(30):
        await leaving


@pytest.mark.parametrize("before_preemption", [False, True])
async def test_an_engine_is_relieved_of_some_at_a_time(before_preemption: bool) -> None:
    core = FakeCore([attempt(number) for number in (1, 2, 3)], lambda _: "")
    core.best = ["1.2", "1.7", "1.3", "1.1"]  # one has ended meanwhile
    moves = moves_of(core)
    for target in ("engine-1", "engine-2"):  # the second order comes while the first one is obeyed
        moves.relieve(Relief(target=target, count=3, before_preemption=before_preemption))
    await until(lambda: len(core.asked) == 2)
    assert [(each.key, each.kv.target) for each in core.attempts] == [
        ("1.1", None),
        ("1.2", "engine-1"),
        ("1.3", "engine-1"),
    ]
    for each in core.attempts[1:]:
        end(each, FinishReason.PREFILLED)
    await until(lambda: len(core.counted) == 2)
    assert core.counted == 2 * ["preemption" if before_preemption else "rebalance"]
    await until(lambda: moves._relief is not None and moves._relief.done())
    moves.relieve(Relief(target="engine-2", count=4, before_preemption=before_preemption))
    await until(lambda: len(core.asked) == 3)
    assert core.attempts[0].kv.target == "engine-2"
    end(core.attempts[0], FinishReason.ABORT)
    await moves.close()
    assert len(core.counted) == 2


async def test_an_engine_whose_core_cannot_say_what_to_lend_keeps_all() -> None:
    core = FakeCore([attempt(1)], lambda _: "")
    core.best = []
    moves = moves_of(core)
    moves.relieve(Relief(target="engine-1", count=1, before_preemption=True))
    await until(lambda: moves._relief is not None and moves._relief.done())
    assert not core.asked
