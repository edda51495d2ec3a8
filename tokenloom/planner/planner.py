"""Decides how many engines prefill and decode: what is missing comes from the other role first, then from new engines.

What keeps it calm: an engine is added as soon as the demand exceeds the engines, but given up only when the largest
demand of a window of time leaves room. The demand is counted in engines and does not depend on how many there are, so a
decision does not change what the next one sees. No I/O.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from .demand import Demand, EngineLoad, Goals, PlannedRole, StepTimeModel, by_role, decode_engines, prefill_engines

FLIP_SECONDS: Final = 60.0
"""An engine may change its role when it was not needed for so long."""
REMOVE_SECONDS: Final = 300.0
"""An engine may be removed when it was not needed for so long: as in Kubernetes, since a new one starts slowly."""
KEEP_SECONDS: Final = 600.0
"""An engine that was added is kept so long: what was asked for in a rush is not taken back at once."""
_FILLED: Final = 0.85
"""Largest share of the remaining engines that the demand may take when an engine is given up."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds the engines of one model."""

    least: int = 1
    """Of each role."""
    most: int = 64
    """Of all roles together."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Names an engine that changes its role."""

    engine: str
    address: str
    role: PlannedRole


@dataclass(frozen=True, slots=True)
class Plan:
    """Says what one model needs.

    Attributes:
        engines: Serving engines by role.
        demand: How many of them the load takes, in fractions.
        wanted: How many there should be by role, after the flips.
        flips: Engines that change their role now.
        replicas: Replicas of each set of engines; a set is named like its pods without their number.
    """

    engines: Mapping[PlannedRole, int]
    demand: Demand
    wanted: Mapping[PlannedRole, int]
    flips: tuple[Flip, ...] = ()
    replicas: Mapping[str, int] = field(default_factory=dict)


class Planner:
    """Plans the engines of one model, look by look."""

    def __init__(self, goals: Goals, limits: Limits) -> None:
        self._goals = goals
        self._limits = limits
        self._steps = StepTimeModel()
        self._flip_peaks = {role: Peak(FLIP_SECONDS) for role in PlannedRole}
        self._remove_peaks = {role: Peak(REMOVE_SECONDS) for role in PlannedRole}
        self._wanted: dict[PlannedRole, int] = {}
        self._added_at: dict[PlannedRole, float] = {}
        self._last: dict[str, tuple[float, int]] = {}  # for each kind of queue, time and length

    def plan(self, engines: Sequence[EngineLoad], now: float) -> Plan:
        """Return what the load needs. ``engines``: the serving ones, at least one; ``now``: monotonic seconds."""
        pairs = any(each.role == PlannedRole.PREFILL for each in engines)
        roles = (PlannedRole.PREFILL, PlannedRole.DECODE) if pairs else (PlannedRole.BOTH,)
        counts = {role: len(by_role(engines, role)) for role in roles}
        demand = self._demand(engines, now, pairs=pairs)
        needs = {
            PlannedRole.PREFILL: demand.prefill,
            PlannedRole.DECODE: demand.decode,
            # Both rates were measured while the engine did both, so each is the demand for the whole of it.
            PlannedRole.BOTH: max(demand.prefill, demand.decode),
        }
        for role in roles:
            self._flip_peaks[role].add(now, needs[role])
            self._remove_peaks[role].add(now, needs[role])
        flips = self._flips(engines, counts, needs, now) if pairs else ()
        for flip in flips:
            other = PlannedRole.DECODE if flip.role == PlannedRole.PREFILL else PlannedRole.PREFILL
            counts[flip.role], counts[other] = counts[flip.role] + 1, counts[other] - 1
        self._scale(counts, needs, now, flipped=bool(flips))
        return Plan(counts, demand, dict(self._wanted), flips, _replicas(engines, counts, self._wanted))

    def _demand(self, engines: Sequence[EngineLoad], now: float, *, pairs: bool) -> Demand:
        prefilling, decoding = (
            by_role(engines, PlannedRole.PREFILL) if pairs else engines,
            by_role(engines, PlannedRole.DECODE),
        )
        for each in decoding:
            if each.running and each.step_seconds and each.step_requests:
                self._steps.observe(each.step_requests, each.step_seconds)
        return Demand(
            prefill_engines(prefilling, self._growth(prefilling, now, "waiting_tokens"), self._goals),
            decode_engines(decoding, self._growth(decoding, now, "waiting"), self._steps, self._goals),
        )

    def _growth(self, engines: Sequence[EngineLoad], now: float, queue: str) -> float:
        """Return how fast a queue has grown since the last look, per second."""
        waiting = sum(getattr(each, queue) for each in engines)
        since, before = self._last.get(queue, (now, waiting))
        self._last[queue] = now, waiting
        return (waiting - before) / (now - since) if now > since else 0.0

    def _flips(
        self,
        engines: Sequence[EngineLoad],
        counts: Mapping[PlannedRole, int],
        needs: Mapping[PlannedRole, float],
        now: float,
    ) -> tuple[Flip, ...]:
        for role, other in ((PlannedRole.PREFILL, PlannedRole.DECODE), (PlannedRole.DECODE, PlannedRole.PREFILL)):
            missing = _engines(needs[role]) - counts[role]
            spare = counts[other] - max(_engines(self._flip_peaks[other].get(now) / _FILLED), self._limits.least)
            # Engines of the other role come first: an engine that starts takes minutes, and one that changes its role
            # is there already. Two autoscalers that look at one gauge each do not see that the other role has engines
            # to spare.
            if (num_flips := min(missing, spare)) > 0:
                idlest = sorted(
                    (each for each in engines if each.role == other),
                    key=lambda each: (each.waiting + each.running, each.waiting_tokens, each.name),
                )
                return tuple(Flip(each.name, each.address, role) for each in idlest[:num_flips])
        return ()

    def _scale(
        self, counts: Mapping[PlannedRole, int], needs: Mapping[PlannedRole, float], now: float, *, flipped: bool
    ) -> None:
        """Move the wanted engines: up at once, down after :data:`REMOVE_SECONDS` and :data:`KEEP_SECONDS`, and to the
        counts after a flip."""
        if flipped or self._wanted.keys() != counts.keys():
            self._wanted = dict(counts)
        for role in counts:
            largest = self._remove_peaks[role].get(now)
            enough = max(_engines(largest / _FILLED), self._limits.least)
            before = self._wanted[role]
            if not math.isfinite(largest):  # of what was there first, some engines may have been starting
                before = max(before, counts[role])
            kept = before if now < self._added_at.get(role, -math.inf) + KEEP_SECONDS else min(before, enough)
            wanted = max(kept, _engines(needs[role]), self._limits.least)
            others = sum(number for each, number in self._wanted.items() if each != role)
            self._wanted[role] = min(wanted, max(self._limits.most - others, counts[role]))
            if self._wanted[role] > before:
                self._added_at[role] = now


def _engines(need: float) -> int:
    """Return the need in whole engines."""
    return math.ceil(need - 1e-6) if math.isfinite(need) else 1 << 30


def _replicas(
    engines: Sequence[EngineLoad], counts: Mapping[PlannedRole, int], wanted: Mapping[PlannedRole, int]
) -> dict[str, int]:
    """Return the replicas of each set of engines: what a role lacks is added to the set that has most of its engines,
    so that an engine that changed its role stays where it is."""
    members = Counter(_set_of(each) for each in engines)
    replicas = dict(members)
    for role in counts:
        sets = Counter(_set_of(each) for each in engines if each.role == role)
        if sets:
            largest = min(sets, key=lambda name: (-sets[name], name))
            replicas[largest] = max(replicas[largest] + wanted[role] - counts[role], 0)
    return replicas


def _set_of(engine: EngineLoad) -> str:
    """Return the name of the StatefulSet of a pod: the pod's without its number."""
    name, dash, number = engine.name.rpartition("-")
    return name if dash and number.isdigit() else engine.name


class Peak:
    """Keeps the maximum of a sliding window of time, as the stabilization of Kubernetes' autoscaler does."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: length of the window."""
        self._seconds = seconds
        self._since: float | None = None
        self._values: deque[tuple[float, float]] = deque()  # falling, so that the first is the maximum

    def add(self, now: float, value: float) -> None:
        """Take the value at ``now``, in seconds of a monotonic clock."""
        self._since = now if self._since is None else self._since
        while self._values and self._values[-1][1] <= value:
            self._values.pop()
        self._values.append((now, value))
        while self._values[0][0] < now - self._seconds:
            self._values.popleft()

    def get(self, now: float) -> float:
        """Return the maximum; infinity while less than a whole window was observed."""
        if self._since is None or now - self._since < self._seconds:
            return float("inf")
        return self._values[0][1]
