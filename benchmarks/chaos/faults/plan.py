"""Makes the plan of a campaign: which fault comes when, as a function of the seed."""

import random
from collections.abc import Sequence

from .fault import Action, Fault, Kind

_INSTANT = frozenset({Action.KILL, Action.TERM, Action.RESET})


def make_plan(
    rng: random.Random, shares: Sequence[tuple[Kind, range]], actions: Sequence[Action], seconds: float
) -> list[Fault]:
    """Return the faults in their order. ``shares``: each kind and the numbers of its faults, which select the actions
    in turns.

    Two faults in a row are of different kinds as long as other kinds are left. ``seconds`` is the duration of faults
    that last.
    """
    left = [_faults(rng, kind, numbers, actions, seconds) for kind, numbers in shares]
    plan: list[Fault] = []
    previous = -1
    while any(left):
        others = [index for index, faults in enumerate(left) if faults and index != previous] or [previous]
        # In proportion to what is left, so that no kind remains for the end alone.
        previous = rng.choices(others, [len(left[index]) for index in others])[0]
        plan.append(left[previous].pop())
    return plan


def in_order(kinds: Sequence[Kind], members: Sequence[int], action: Action, rounds: int) -> list[Fault]:
    """Return one fault for each of the ``members`` [len(kinds)] of every kind in turn, ``rounds`` times.

    The choices select the members one after the other.
    """
    return [
        Fault(action, kind, 0.0, (member + 0.5) / count)
        for _ in range(rounds)
        for kind, count in zip(kinds, members, strict=True)
        for member in range(count)
    ]


def _faults(rng: random.Random, kind: Kind, numbers: range, actions: Sequence[Action], seconds: float) -> list[Fault]:
    of_kind = [actions[number % len(actions)] for number in numbers]
    rng.shuffle(of_kind)
    return [Fault(action, kind, 0.0 if action in _INSTANT else seconds, rng.random()) for action in of_kind]


def take_possible(plan: list[Fault], possible: Sequence[bool]) -> Fault | None:
    """Remove and return the first fault that is possible now; None: no fault is. ``possible``: [len(plan)]."""
    for index, can in enumerate(possible):
        if can:
            return plan.pop(index)
    return None
