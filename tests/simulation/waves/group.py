"""A simulated data-parallel group: ranks, a hub and a coordinator that exchange messages with random delays.

``Waves``, ``Rounds`` and ``WaveStarts`` are the product's own. A rank is a loop that computes a step, a dummy one if it
has no request, whenever its ``Waves`` says so. Times are seconds of the simulation.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenloom.engine_core.data_parallel.group_link import Letters, Rounds
from tokenloom.engine_core.data_parallel.messages import (
    Accepted,
    Called,
    Challenge,
    Newcomers,
    Outcome,
    Refused,
    ToRank,
    Vote,
    Want,
    Welcome,
)
from tokenloom.engine_core.data_parallel.wave_loop import STEPS_BETWEEN_VOTES, Waves, WaveState
from tokenloom.services.coordinator.engines.data_parallel_groups import WaveStarts


class Clock:
    """Runs what was planned, in the order of its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (self.now + seconds, next(self._numbers), action))

    def run(self, most: int) -> bool:
        """Run until nothing is planned. Returns False if there were more than ``most`` actions."""
        for _ in range(most):
            if not self._planned:
                return True
            self.now, _, action = heapq.heappop(self._planned)
            action()
        return False


@dataclass
class Request:
    """A request of one rank: it needs so many steps of that rank."""

    rank: int
    steps: int
    outcome: str = ""
    """``served``, or the name of a typed error."""


@dataclass
class Rank:
    """The state of one simulated engine core."""

    number: int
    step_seconds: float
    waves: Waves = field(init=False)
    requests: list[Request] = field(default_factory=list)
    is_paused: bool = False
    is_asleep: bool = False
    """A pause is complete: no step may run."""
    is_lost: bool = False
    is_stepping: bool = False
    pauses_wanted: int = 0
    pauses_complete: int = 0
    steps_of_wave: dict[int, int] = field(default_factory=dict)


class Group:
    """A group of ranks that starts with ``size`` of them. ``violations`` names what must not have happened."""

    def __init__(self, rng: random.Random, clock: Clock, size: int) -> None:
        self.rng, self.clock = rng, clock
        self.rounds = Rounds(size)
        self.starts = WaveStarts()
        self.ranks: dict[int, Rank] = {}
        self.violations: list[str] = []
        self.is_lost = False
        self.num_stale = 0
        self.num_steps = 0
        self._last_delivery: dict[object, float] = {}
        self.coordinator_is_up = True
        for number in range(size):
            self.add_rank(number)

    # Network: connections keep the order of messages; each message takes its own time.

    def _send(self, connection: object, action: Callable[[], None], slowest: float = 0.01) -> None:
        at = max(self.clock.now + self.rng.uniform(0.0001, slowest), self._last_delivery.get(connection, 0.0))
        self._last_delivery[connection] = at
        self.clock.after(at - self.clock.now, action)

    def _deliver(self, letters: Letters) -> None:
        for number, message in letters:
            rank = self.ranks[number]
            self._send(("hub", rank.number, id(rank)), lambda rank=rank, message=message: self._receive(rank, message))

    def _receive(self, rank: Rank, message: ToRank) -> None:
        if rank.is_lost or self.is_lost:
            return
        match message:
            case Welcome():
                rank.waves.welcome(message)
            case Called():
                rank.waves.start(message.wave)
            case Outcome():
                rank.waves.decided(message)
            case Newcomers():
                if rank.waves.target > rank.waves.size:
                    rank.waves.call()
            case Refused():
                self.violations.append(f"rank {rank.number} was refused: {message.reason}")
            case Accepted() | Challenge():
                pass
        self._settle(rank)

    def _vote(self, rank: Rank, vote: Vote) -> None:
        def arrive() -> None:
            if not self.is_lost and not rank.is_lost and rank.number in self.rounds.members:
                self._deliver(self.rounds.vote(rank.number, vote))

        self._send(("rank", rank.number, id(rank)), arrive)

    # Ranks

    def add_rank(self, number: int) -> Rank:
        """Start a rank, which loads its weights and then connects."""
        rank = self.ranks[number] = Rank(number, self.rng.uniform(0.001, 0.02))
        rank.waves = Waves(number, lambda: _want(rank), lambda vote: self._vote(rank, vote))

        def connect() -> None:
            if not rank.is_lost and not self.is_lost and self.ranks[number] is rank:
                self._deliver(self.rounds.join(number))

        self.clock.after(self.rng.uniform(0, 0.5), connect)
        return rank

    def lose(self, number: int) -> None:
        """Kill a rank. The hub notices; a lost member ends the group, and every request with a typed error."""
        rank = self.ranks[number]
        rank.is_lost = True
        if number == 0 or self.rounds.leave(number):
            self.is_lost = True
            for each in self.ranks.values():
                self._end_requests(each, "TRY_ELSEWHERE")
        else:
            self._end_requests(rank, "TRY_ELSEWHERE")
            self.starts.leave(str(number))

    def add_request(self, request: Request) -> None:
        rank = self.ranks.get(request.rank)
        if rank is None or rank.is_lost or self.is_lost or rank.waves.state in (WaveState.NEW, WaveState.REMOVED):
            request.outcome = "TRY_ELSEWHERE"
            return
        if rank.waves.target and rank.number >= rank.waves.target:  # it drains
            request.outcome = "TRY_ELSEWHERE"
            return
        rank.requests.append(request)
        self._settle(rank)

    def pause(self, number: int) -> None:
        rank = self.ranks[number]
        if not rank.is_paused:
            rank.is_paused = True
            rank.pauses_wanted += 1
            self._settle(rank)

    def resume(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.is_paused:
            if not rank.is_asleep:  # as the engine does: the caller of the pause gets an error
                rank.pauses_complete += 1
            rank.is_paused = rank.is_asleep = False
            rank.waves.call()
            self._settle(rank)

    def resize(self, number: int, size: int) -> None:
        """Ask one rank to reconfigure. One that shall leave ends its requests elsewhere first."""
        rank = self.ranks[number]
        if number >= size:
            self._end_requests(rank, "TRY_ELSEWHERE")
        rank.waves.resize(size)
        self._settle(rank)

    def _end_requests(self, rank: Rank, outcome: str) -> None:
        for request in rank.requests:
            request.outcome = outcome
        rank.requests.clear()

    def _settle(self, rank: Rank) -> None:
        """As ``WaveLoop.settle``: requests may call for a wave, a pause may be complete, the coordinator learns."""
        if rank.is_lost or self.is_lost:
            return
        rank.waves.look()
        if rank.is_paused and not rank.is_asleep and rank.waves.is_resting:
            rank.is_asleep = True
            rank.pauses_complete += 1
        if rank.waves.state is WaveState.REMOVED:
            self._end_requests(rank, "TRY_ELSEWHERE")
            if self.ranks[rank.number] is rank:  # otherwise another one has its number
                self.starts.leave(str(rank.number))
        self._report(rank)
        if rank.waves.is_running and not rank.is_stepping:
            rank.is_stepping = True
            self.clock.after(rank.step_seconds * self.rng.uniform(0.5, 2), lambda: self._step(rank))

    def _step(self, rank: Rank) -> None:
        rank.is_stepping = False
        if rank.is_lost or self.is_lost:
            return
        if rank.is_asleep:
            self.violations.append(f"rank {rank.number} computes although its pause is complete")
        self.num_steps += 1
        self._check_lockstep(rank)
        if rank.requests and not rank.is_paused:
            request = rank.requests[0]
            request.steps -= 1
            if not request.steps:
                rank.requests.pop(0).outcome = "served"
        rank.waves.stepped()
        self._settle(rank)

    def _check_lockstep(self, rank: Rank) -> None:
        """No rank is more steps ahead of another member than lie between two votes."""
        for other in self.rounds.members:
            waves = self.ranks[other].waves
            if waves.state is WaveState.NEW:
                continue
            if waves.wave > rank.waves.wave or rank.waves.wave - waves.wave > 1:
                self.violations.append(f"rank {rank.number} steps in wave {rank.waves.wave}, rank {other} is elsewhere")
            if waves.wave == rank.waves.wave and rank.waves.step - waves.step > STEPS_BETWEEN_VOTES:
                self.violations.append(f"rank {rank.number} is too far ahead of rank {other}")

    # Coordinator

    def _report(self, rank: Rank) -> None:
        waves = rank.waves
        if waves.state in (WaveState.NEW, WaveState.REMOVED):
            return
        started, completed = waves.started, waves.completed

        def arrive() -> None:
            if self.coordinator_is_up and not rank.is_lost and rank.number in self.rounds.members:
                self.starts.report(str(rank.number), started, completed)
                self._start()

        self._send(("report", rank.number, id(rank)), arrive, slowest=0.1)

    def _start(self) -> None:
        for name, wave in self.starts.due():
            rank = self.ranks[int(name)]

            def arrive(rank: Rank = rank, wave: int = wave) -> None:
                if rank.is_lost or self.is_lost:
                    return
                self.num_stale += wave < rank.waves.wave
                rank.waves.start(wave)
                self._settle(rank)

            self._send(("command", rank.number, id(rank)), arrive, slowest=0.1)
            if self.rng.random() < 0.2:  # a start may come twice, and late
                self.clock.after(self.rng.uniform(0, 2), arrive)

    def restart_coordinator(self) -> None:
        """Lose the coordinator; another one learns everything from the reports of ranks that join it."""
        self.coordinator_is_up = False
        self.starts = WaveStarts()

        def back() -> None:
            self.coordinator_is_up = True
            for rank in self.ranks.values():
                self._report(rank)

        self.clock.after(self.rng.uniform(0.1, 2), back)


def _want(rank: Rank) -> Want:
    if rank.is_paused:
        return Want.PAUSED
    return Want.RUN if rank.requests else Want.IDLE
