"""What one run does besides its scenario: in which order tasks run, what is cancelled, which write fails."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random

_MAX_FULL = 12
"""So many accesses in a row may find the disk full."""


class Fault(StrEnum):
    """What may happen to the disk."""

    NONE = "none"
    CRASH = "crash"
    """The process ends in the middle of an access, and another one begins with what is there."""
    FULL = "full"
    """For a while there is no room, or every change fails."""


@dataclass(frozen=True)
class Size:
    """Says how long the undisturbed run of a scenario is.

    Attributes:
        awaits: How often tasks wait that may be cancelled.
        accesses: How often the disk is changed.
    """

    awaits: int
    accesses: int


UNKNOWN = Size(0, 0)


@dataclass(frozen=True)
class Plan:
    """Describes one run.

    Attributes:
        seed: Of the order and of the scenario's own choices.
        cancels: The numbers of the awaits at which their task is cancelled; True: only when what it awaits is there.
        fault: What happens to the disk.
        fault_at: The number of the first access that it happens to.
        num_full: How many accesses find the disk full.
        is_broken: They find it broken instead (EIO): nothing can be renamed or made durable either.
        by_priority: The task with the highest priority runs, as long as it can; otherwise each step is drawn.
        in_pieces: Threads pause at each access of the disk.
    """

    seed: int
    cancels: Mapping[int, bool] = field(default_factory=dict)
    fault: Fault = Fault.NONE
    fault_at: int = -1
    num_full: int = 0
    is_broken: bool = False
    by_priority: bool = False
    in_pieces: bool = False

    def undisturbed(self) -> "Plan":
        """Return the plan without cancellations and faults."""
        return replace(self, cancels={}, fault=Fault.NONE)

    def __str__(self) -> str:
        cancels = ", ".join(f"{number}{' late' * late}" for number, late in self.cancels.items()) or "none"
        order = "by priority" if self.by_priority else "drawn"
        fault = "" if self.fault is Fault.NONE else f", {self.fault} at access {self.fault_at}"
        fault += " (EIO)" if self.is_broken else ""
        return f"order {order}, threads {'in pieces' if self.in_pieces else 'whole'}, cancelled awaits {cancels}{fault}"


def make_plan(seed: int, size: Size) -> Plan:
    """Return the plan of a seed: first every single await in turn, then random pairs; the same with the disk's
    accesses, if there are any."""
    random = Random(f"plan {seed}")
    plan = Plan(seed, by_priority=random.random() < 0.5, in_pieces=random.random() < 0.5)
    kinds = ("cancel", "crash", "cancel", "full") if size.accesses else ("cancel",)
    kind, turn = kinds[seed % len(kinds)], seed // len(kinds)
    if kind == "cancel":
        turn = turn * kinds.count("cancel") + seed % len(kinds) // 2
        return replace(plan, cancels=_cancels(turn, size.awaits, random))
    singles = range(size.accesses)
    at = turn if turn in singles else random.randrange(size.accesses)
    cancels = {} if turn in singles else _some(random.randrange(2), size.awaits, random)
    num_full = random.randint(1, _MAX_FULL) if kind == "full" else 0
    is_broken = kind == "full" and Random(f"broken {seed}").random() < 0.5  # so that the other draws stay as they were
    return replace(plan, fault=Fault(kind), fault_at=at, num_full=num_full, is_broken=is_broken, cancels=cancels)


def _cancels(turn: int, awaits: int, random: Random) -> dict[int, bool]:
    if not awaits or not turn:
        return {}  # the first run of a scenario is undisturbed
    if turn <= awaits:
        return {turn - 1: random.random() < 0.5}
    return _some(2, awaits, random)


def _some(number: int, awaits: int, random: Random) -> dict[int, bool]:
    return {random.randrange(awaits): random.random() < 0.5 for _ in range(number if awaits else 0)}
