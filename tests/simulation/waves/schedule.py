"""Runs one random schedule of requests, pauses, changes of size and losses, and checks what must hold."""

import random
from collections import Counter
from dataclasses import dataclass, field

from tokenloom.engine_core.data_parallel.wave_loop import WaveState

from .group import Clock, Group, Request

SECONDS = 4.0
"""Everything that a schedule does happens within this time."""
_PAUSE_SECONDS = 8.0
"""Longer than all ranks need to agree on a pause, with the slowest steps and without a coordinator for a while."""
_MOST_ACTIONS = 300_000
KINDS = ("pause_all", "pause_one", "grow", "shrink", "lose_member", "lose_newcomer", "restart_coordinator")


@dataclass
class Result:
    """What one schedule did."""

    seed: int
    violations: list[str]
    outcomes: Counter[str]
    happened: Counter[str] = field(default_factory=Counter)


class Schedule:
    """Plans what happens to one group."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._seed = seed
        self._clock = Clock()
        self._size = rng.randint(2, 4)
        self._group = Group(rng, self._clock, self._size)
        self._requests: list[Request] = []
        self._happened: Counter[str] = Counter()

    def run(self) -> Result:
        """Run the schedule to its end and check it."""
        rng, clock = self._rng, self._clock
        for _ in range(rng.randint(1, 12)):
            # Some ranks get many requests, others none: they must not wait for each other.
            request = Request(min(rng.randrange(self._size + 1), rng.randrange(self._size + 1)), rng.randint(1, 90))
            self._requests.append(request)
            clock.after(rng.uniform(0.6, SECONDS), lambda request=request: self._group.add_request(request))
        kinds = rng.sample(KINDS, rng.randint(0, 3))
        for kind in kinds if "pause_all" not in kinds else sorted(set(kinds) - {"pause_one"}):
            at = rng.uniform(0.6, SECONDS)
            clock.after(at, lambda kind=kind: self._do(kind))
        ended = clock.run(_MOST_ACTIONS)
        self._check(ended)
        outcomes = Counter(request.outcome for request in self._requests)
        self._happened["stale start ignored"] = self._group.num_stale
        return Result(self._seed, self._group.violations, outcomes, self._happened)

    def _do(self, kind: str) -> None:
        if self._group.rounds.members:
            self._happened[kind] += 1
            getattr(self, f"_{kind}")()

    def _pause_all(self) -> None:
        """Pause every rank; the pause must be complete on all of them. Then resume, one rank after the other."""
        group, clock = self._group, self._clock
        paused = {number: group.ranks[number] for number in group.rounds.members}
        for number in sorted(paused):
            clock.after(self._rng.uniform(0, 0.3), lambda number=number: group.pause(number))

        def check() -> None:
            members = [group.ranks[number] for number in group.rounds.members]
            if all(paused.get(rank.number) is rank for rank in members):
                awake = [rank.number for rank in members if not rank.is_asleep]
                if awake:
                    group.violations.append(f"all ranks were paused, but ranks {awake} do not rest")
            for number in sorted(paused):
                clock.after(self._rng.uniform(0, 1), lambda number=number: group.resume(number))

        clock.after(_PAUSE_SECONDS, check)

    def _pause_one(self) -> None:
        number = self._rng.choice(sorted(self._group.rounds.members))
        self._group.pause(number)
        self._clock.after(self._rng.uniform(0.1, 3), lambda: self._group.resume(number))

    def _grow(self) -> None:
        size = self._group.rounds.size
        target = size + self._rng.randint(1, 2)
        for number in range(size, target):
            if not self._is_live(number):
                self._group.add_rank(number)
        self._resize(target)

    def _shrink(self) -> None:
        self._resize(self._rng.randint(1, self._group.rounds.size))

    def _resize(self, size: int) -> None:
        for number in sorted(self._group.rounds.members):
            self._clock.after(self._rng.uniform(0, 0.4), lambda number=number: self._group.resize(number, size))

    def _lose_member(self) -> None:
        self._group.lose(self._rng.choice(sorted(self._group.rounds.members)))

    def _lose_newcomer(self) -> None:
        """Lose a rank while it joins; another one takes its place."""
        number = self._group.rounds.size
        if self._is_live(number):
            return
        self._group.add_rank(number)
        self._resize(number + 1)

        def lose() -> None:
            if self._is_live(number):
                self._happened["lost while joining"] += number not in self._group.rounds.members
                self._group.lose(number)

        self._clock.after(self._rng.uniform(0, 0.6), lose)

    def _is_live(self, number: int) -> bool:
        rank = self._group.ranks.get(number)
        return rank is not None and not rank.is_lost and rank.waves.state is not WaveState.REMOVED

    def _restart_coordinator(self) -> None:
        self._group.restart_coordinator()

    def _check(self, ended: bool) -> None:
        group, violations = self._group, self._group.violations
        if not ended:
            violations.append("the group does not come to rest")
        if waiting := [request for request in self._requests if not request.outcome]:
            violations.append(f"{len(waiting)} requests have no outcome")
        if absent := [number for number in range(group.rounds.size) if number not in group.rounds.members]:
            violations.append(f"ranks {absent} are no members in the end")
            return
        for number in sorted(group.rounds.members):
            rank = group.ranks[number]
            if rank.pauses_complete != rank.pauses_wanted:
                violations.append(f"rank {number} completed {rank.pauses_complete} of {rank.pauses_wanted} pauses")
            if not rank.waves.is_resting:
                violations.append(f"rank {number} does not rest in the end: {rank.waves.state.name}")
            if (rank.waves.wave, rank.waves.size) != (group.ranks[0].waves.wave, group.rounds.size):
                violations.append(f"rank {number} is at wave {rank.waves.wave} of {rank.waves.size} ranks")
        targets = {group.ranks[number].waves.target for number in group.rounds.members}
        newcomers = range(group.rounds.size, max(targets))
        if len(targets) == 1 and targets != {group.rounds.size} and all(map(self._is_live, newcomers)):
            violations.append(f"all ranks want a group of {targets}, and it has {group.rounds.size}")


def run_seed(seed: int) -> Result:
    """Run the schedule of one seed."""
    return Schedule(seed).run()
