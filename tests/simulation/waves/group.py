"""A simulated data-parallel group: ranks, a hub and a coordinator that exchange messages with random delays.

``Waves``, ``Rounds`` and ``WaveStarts`` are the product's own. A rank is a loop that computes a step, a dummy one if it
has no request, whenever its ``Waves`` says so. Times are seconds of the simulation.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenloom.engine_core.data_parallel.group_hub import Letters, Rounds
from tokenloom.engine_core.data_parallel.messages import (
    Accepted,
    Called,
    Challenge,
    Ended,
    GroupHello,
    Lost,
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
    is_muted: bool = False
    """Its link has lost the hub and has no welcome of another one."""
    known: tuple[int, int] = (0, 0)
    """The size of its group, and the wave, that its link heard last."""
    is_stepping: bool = False
    pauses_wanted: int = 0
    pauses_complete: int = 0
    steps_of_wave: dict[int, int] = field(default_factory=dict)


class Group:
    """A group of ranks that starts with ``size`` of them. ``violations`` names what must not have happened."""

    def __init__(self, rng: random.Random, clock: Clock, size: int) -> None:
        self.rng, self.clock = rng, clock
        self.rounds = Rounds(size)
        self._first_size = size
        self._hub = 0  # counts the hubs that the group has had
        self.starts = WaveStarts()
        self.ranks: dict[int, Rank] = {}
        self.violations: list[str] = []
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
        hub = self._hub
        for number, message in letters:
            rank = self.ranks[number]
            self._send(
                ("hub", hub, rank.number, id(rank)),
                lambda rank=rank, message=message: self._receive(rank, message, hub),
            )

    def _receive(self, rank: Rank, message: ToRank, hub: int) -> None:
        if rank.is_lost or hub != self._hub:
            return
        if isinstance(message, (Welcome, Outcome, Lost)):
            rank.known = message.size, message.wave
        match message:
            case Welcome():
                rank.is_muted = False
                rank.waves.welcome(message)
            case Lost():
                rank.waves.rest(message)
            case Called():
                rank.waves.start(message.wave)
            case Outcome():
                rank.waves.decided(message)
            case Newcomers():
                if rank.waves.target > rank.waves.size or message.ranks[0] < rank.waves.size:
                    rank.waves.call()
            case Refused():
                self.violations.append(f"rank {rank.number} was refused: {message.reason}")
            case Accepted() | Challenge() | Ended():
                pass
        self._settle(rank)

    def _vote(self, rank: Rank, vote: Vote) -> None:
        hub = self._hub

        def arrive() -> None:
            if hub == self._hub and not rank.is_lost and rank.number in self.rounds.members:
                self._deliver(self.rounds.vote(rank.number, vote))

        if not rank.is_muted:
            self._send(("rank", hub, rank.number, id(rank)), arrive)

    # Ranks

    def add_rank(self, number: int) -> Rank:
        """Start a rank, which loads its weights and then connects."""
        rank = self.ranks[number] = Rank(number, self.rng.uniform(0.001, 0.02))
        rank.waves = Waves(number, lambda: _want(rank), lambda vote: self._vote(rank, vote))
        self._connect(rank)
        return rank

    def _connect(self, rank: Rank) -> None:
        hub = self._hub

        def connect() -> None:
            if not rank.is_lost and hub == self._hub and self.ranks[rank.number] is rank:
                size, wave = rank.known
                self._deliver(self.rounds.join(rank.number, GroupHello("group", rank.number, {}, size=size, wave=wave)))

        self.clock.after(self.rng.uniform(0, 0.5), connect)

    def lose(self, number: int) -> None:
        """Kill a rank, whose requests go on elsewhere. The hub tells the others, or was the rank's own: then these look
        for the next one. Another process takes the rank's place some time later."""
        rank = self.ranks[number]
        rank.is_lost = True
        self._end_requests(rank, "TRY_ELSEWHERE")
        self.starts.leave(str(number))
        if number:
            self._deliver(self.rounds.leave(number))
        else:
            self._lose_hub()
        self.clock.after(self.rng.uniform(0, 1), lambda: self._replace(rank))

    def _replace(self, rank: Rank) -> None:
        if self.ranks[rank.number] is rank:
            self.add_rank(rank.number)

    def _lose_hub(self) -> None:
        self._hub += 1
        left = [rank for rank in self.ranks.values() if not rank.is_lost and rank.waves.state is not WaveState.REMOVED]
        # What starts rank 0 again knows the size if no other rank is left that does.
        self.rounds = Rounds(self._first_size if any(rank.known[0] for rank in left) else self.rounds.size)
        for rank in left:
            rank.is_muted = True
            self._send(("end", rank.number, id(rank)), lambda rank=rank, hub=self._hub: self._break_off(rank, hub))
            self._connect(rank)

    def _break_off(self, rank: Rank, hub: int) -> None:
        if rank.is_muted and hub == self._hub:  # otherwise it has another hub by now
            rank.waves.break_off()
            self._settle(rank)

    def add_request(self, request: Request) -> None:
        rank = self.ranks.get(request.rank)
        if rank is None or rank.is_lost or rank.waves.state in (WaveState.NEW, WaveState.REMOVED):
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
        if rank.is_lost:
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
        if rank.is_lost or not rank.waves.is_running:
            return  # the step is lost with the connections to other ranks
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
        """No rank is more steps ahead of another member than lie between two votes; one of both may not know yet that a
        member was lost."""
        for other in self.rounds.members:
            waves = self.ranks[other].waves
            is_stale = min(waves.wave, rank.waves.wave) < self.rounds._oldest_wave
            if waves.state in (WaveState.NEW, WaveState.LOST) or is_stale:
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
                if rank.is_lost:
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
