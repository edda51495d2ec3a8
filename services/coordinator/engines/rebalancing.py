"""Decides when running requests go on at an engine that has less to do. With hysteresis: under a constant load it comes
to rest. No I/O."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tokenloom.services.runtime.peers.hello import LIVE_MOVES
from tokenloom.services.runtime.placement.rules import load_score
from tokenloom.v1.coordinator_pb2 import EngineState
from tokenloom.v1.types_pb2 import EngineRole

from .engine_record import EngineRecord

HOT_SECONDS: Final = 3.0
"""How long an engine must have more to do than another one by the factor. A burst of short requests ends before."""
APART_SECONDS: Final = 2.0
"""Between two orders that an engine gives or takes: by then its reports show what the last one has moved."""
REST_SECONDS: Final = 60.0
"""An engine that has given requests takes none for so long, and one that has taken some gives none away."""
MARGIN: Final = 6
"""Least difference of scores. Two engines with a few requests differ by a factor all the time."""
# A request that leaves lowers the score by 4 where another one begins in its seat, and raises the other engine's by 1:
# with a sixth of the difference the order of the two never turns round, so that nothing moves back.
_SHARE: Final = 6
MOST: Final = 4
"""Requests of one order."""
FULL: Final = 0.8
"""Use of the KV cache from which on an engine is hot by it alone."""
SHORT_APART_SECONDS: Final = 0.2
"""Between two orders of an engine that is about to preempt a request, and between two that an engine takes: until its
next report, its free blocks are those that the last order was given."""
ROOM: Final = 0.7
"""Use of the KV cache up to which an engine takes a request that another one would preempt."""


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What the rule reads of one engine.

    Attributes:
        kind: Equal of engines that can go on with each other's requests.
        waiting, running, seats, kv_usage: As in its report; picks on their way wait.
        free_tokens: Those for which it has free KV blocks.
        may_give, may_take: Whether it can at all.
        is_short: Whether it is about to preempt a request.
    """

    name: str
    kind: bytes
    waiting: int
    running: int
    seats: int
    kv_usage: float
    free_tokens: int
    may_give: bool = True
    may_take: bool = True
    is_short: bool = False

    @property
    def score(self) -> int:
        """What picks compare."""
        return load_score(self.waiting, self.running)


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Lets up to ``count`` running requests of ``source`` go on at ``target``. ``before_preemption``: those that it
    would preempt first, instead of those that have the most to do. ``free_tokens``: those of the target."""

    source: str
    target: str
    count: int
    free_tokens: int
    before_preemption: bool = False


class Rebalancer:
    """Compares each engine with the one of its kind that has least to do.

    Attributes:
        is_on: Whether it looks for hot engines.
    """

    def __init__(self, factor: float) -> None:
        """``factor``: above 1. An engine is hot when its score, or its use of a nearly full KV cache, exceeds the other
        one's so many times; it stays hot until only half of that excess is left. 0: no engine is ever hot, and only
        what would be preempted moves."""
        self._high, self._low = factor, (1 + factor) / 2
        self.is_on = factor > 0
        self._hot_since: dict[str, float] = {}
        self._gave: dict[str, float] = {}
        self._took: dict[str, float] = {}
        self._pairs: dict[tuple[str, str], float] = {}

    def orders(self, engines: Iterable[EngineCounts], now: float) -> list[MoveOrder]:
        """Return what is to move now. To be called several times a second. ``now``: monotonic seconds."""
        self._forget(now)
        kinds: dict[bytes, list[EngineCounts]] = {}
        for engine in engines:
            kinds.setdefault(engine.kind, []).append(engine)
        names = {engine.name for group in kinds.values() for engine in group}
        self._hot_since = {name: since for name, since in self._hot_since.items() if name in names}
        return [order for group in kinds.values() for order in self._of_kind(group, now)]

    def _of_kind(self, engines: Sequence[EngineCounts], now: float) -> list[MoveOrder]:
        takers = [each for each in engines if self._can_take(each)]
        takers.sort(key=lambda each: (each.score, each.kv_usage, each.name))
        orders = list[MoveOrder]()
        for source in sorted(engines, key=self._turn):
            others = [each for each in takers if each.name != source.name]
            if not (source.may_give and others):
                self._hot_since.pop(source.name, None)
            elif (order := self._order(source, others, now)) is not None:
                orders.append(order)
                takers = [each for each in takers if each.name not in (order.source, order.target)]
                self._gave[order.source] = self._took[order.target] = self._pairs[order.source, order.target] = now
        return orders

    def _turn(self, source: EngineCounts) -> tuple[bool, float, int, str]:
        """Return by what engines that may give are sorted: first those that are short, in turns, as they may all need
        the same one that has room."""
        gave = self._gave.get(source.name, -math.inf) if source.is_short else 0.0
        return not source.is_short, gave, -source.score, source.name

    def _can_take(self, engine: EngineCounts) -> bool:
        has_room = engine.running < engine.seats and not (engine.waiting or engine.is_short)
        return engine.may_take and has_room and engine.name not in self._gave

    def _order(self, source: EngineCounts, others: Sequence[EngineCounts], now: float) -> MoveOrder | None:
        """Return what moves from ``source``. ``others``: may take it, those with least to do first."""
        since_last = now - self._gave.get(source.name, now - REST_SECONDS)  # those of longer ago are forgotten
        if source.is_short and since_last >= SHORT_APART_SECONDS:
            came_from = {giver for giver, taker in self._pairs if taker == source.name}
            just_took = {taker for taker, at in self._took.items() if now - at < SHORT_APART_SECONDS}
            without = came_from | just_took
            with_room = [each for each in others if each.kv_usage <= ROOM and each.name not in without]
            if with_room:
                target = min(with_room, key=lambda each: (each.kv_usage, each.name))
                return MoveOrder(source.name, target.name, 1, target.free_tokens, before_preemption=True)
        target = others[0]
        if not self.is_on:
            return None
        if _exceeds(source, target, self._high):
            self._hot_since.setdefault(source.name, now)
        elif not _exceeds(source, target, self._low):
            self._hot_since.pop(source.name, None)
        is_hot = now - self._hot_since.get(source.name, now) >= HOT_SECONDS
        since_last = min(since_last, now - self._took.get(target.name, now - REST_SECONDS))
        if not is_hot or source.name in self._took or since_last < APART_SECONDS:
            return None
        count = max(1, min(MOST, (source.score - target.score) // _SHARE, target.seats - target.running))
        return MoveOrder(source.name, target.name, count, target.free_tokens)

    def _forget(self, now: float) -> None:
        for times in (self._gave, self._took):
            for name in [name for name, at in times.items() if now - at >= REST_SECONDS]:
                del times[name]
        for pair in [pair for pair, at in self._pairs.items() if now - at >= REST_SECONDS]:
            del self._pairs[pair]


def _exceeds(source: EngineCounts, target: EngineCounts, factor: float) -> bool:
    """Return whether an engine has so many times as much to do as another one."""
    if source.score - target.score >= MARGIN and source.score > factor * target.score:
        return True
    # Not to an engine that has more requests then: moves would go round.
    has_fewer = source.score - target.score >= 2 and source.running > 1
    return has_fewer and source.kv_usage >= FULL and source.kv_usage > factor * target.kv_usage


def counts_of(record: EngineRecord) -> EngineCounts:
    """Return what the rule reads of an engine that has joined."""
    identity, report = record.identity, record.report
    decodes = report.role != EngineRole.ENGINE_ROLE_PREFILL
    moves = decodes and bool(identity.kv_address) and LIVE_MOVES in record.first.hello.features
    return EngineCounts(
        name=identity.engine_id,
        kind=record.fingerprint_bytes,
        waiting=record.num_waiting,
        running=report.running,
        seats=report.seats,
        kv_usage=report.kv_usage,
        free_tokens=report.free_kv_blocks * identity.fingerprint.block_size,
        may_give=moves and record.own_state == EngineState.ENGINE_STATE_SERVING and not record.is_late,
        may_take=moves and record.state == EngineState.ENGINE_STATE_SERVING and not record.is_late,
        is_short=report.short_of_blocks,
    )
