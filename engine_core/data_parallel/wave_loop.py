"""Waves of a data-parallel group of a mixture-of-experts model, as one rank sees them; joins a core to them:
when it computes, what it votes, and what its client learns. No I/O.

The experts of such a model may be spread over the ranks, so that a step of one rank needs a step of every other rank.
All ranks therefore compute together or rest together. A wave begins when a rank has a request, and ends when the ranks
agree that none has any. They vote before the first step and then every :data:`STEPS_BETWEEN_VOTES` steps; a rank
without requests computes a dummy batch in each step. (vLLM V1: ``DPEngineCoreProc``; its ranks vote by an all-reduce.)
"""

import enum
import logging
from collections.abc import Callable
from typing import Protocol

from ..core import EngineCore
from ..data.config import ParallelConfig
from ..data.errors import GroupLostError, PeerLostError
from ..data.messages import EngineCoreOutputs, GroupState
from ..data.parallel_config import ExpertPeers
from .messages import (
    MAX_RANKS,
    Called,
    Ended,
    Lost,
    Newcomers,
    Outcome,
    Roster,
    ToRank,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
)

log = logging.getLogger(__name__)

# As in vLLM. A vote stops all ranks for a round trip; between two votes an idle rank computes up to 31 dummy batches.
STEPS_BETWEEN_VOTES = 32


class WaveState(enum.Enum):
    """States of a rank."""

    NEW = enum.auto()
    """It waits to become a member of the group."""
    RESTING = enum.auto()
    VOTING = enum.auto()
    """It has voted and computes nothing until the outcome is known."""
    RUNNING = enum.auto()
    """It computes a step in every turn of its loop."""
    LOST = enum.auto()
    """It has lost the hub, or workers of other ranks, and computes nothing until the hub says how the group goes on."""
    REMOVED = enum.auto()
    """The group goes on without it."""


class Waves:
    """Decides when a rank computes steps. Belongs to the thread that steps.

    Attributes:
        rank: Its number in the group.
        size: Ranks of the group; 0 before this one is a member.
        target: Ranks that the group should have. Each vote names it.
        wave: The number of the wave that runs, or of the next one. It is the same on all ranks.
        step: Steps of that wave that this rank has computed.
    """

    def __init__(self, rank: int, want: Callable[[], Want], cast: Callable[[Vote], None]) -> None:
        """``want``: returns what the rank wants of a wave now. ``cast``: sends a vote to the hub."""
        self.rank = rank
        self.size = self.target = 0
        self.wave = self.step = 0
        self.state = WaveState.NEW
        self._want = want
        self._cast = cast
        self._is_held = False  # a rank is paused: none begins a wave until that rank resumes and calls for one
        self._is_called = False  # another wave is to begin right after the one that is being voted on

    @property
    def is_running(self) -> bool:
        """Whether this rank must compute a step."""
        return self.state is WaveState.RUNNING

    @property
    def is_resting(self) -> bool:
        """Whether this rank computes nothing now: it waits to be admitted, was removed, or no wave runs."""
        return self.state not in (WaveState.VOTING, WaveState.RUNNING)

    @property
    def started(self) -> int | None:
        """The wave that this rank has begun, which the others must begin too; None at rest."""
        return None if self.is_resting else self.wave

    @property
    def completed(self) -> int | None:
        """The last wave that has ended; None before the first."""
        return self.wave - 1 if self.wave else None

    def welcome(self, welcome: Welcome) -> None:
        """Become a member."""
        self.wave, self.step = welcome.wave, welcome.step
        self.size = self.target = welcome.size
        self.state = WaveState.RUNNING if welcome.runs else WaveState.RESTING
        self._is_held = False  # the paused rank that held the wave may have been lost with the hub
        self._rested()

    def break_off(self) -> None:
        """Compute nothing until the hub says how the group goes on: by :meth:`rest`, or by :meth:`welcome` if it is
        another one."""
        if self.state not in (WaveState.NEW, WaveState.REMOVED):
            self.state = WaveState.LOST

    def rest(self, lost: Lost) -> None:
        """Rest with the other members, because the group has lost one of them, or their workers had to join anew."""
        self.size = lost.size
        self.wave, self.step, self.state = lost.wave, 0, WaveState.RESTING
        self._is_held = False
        self._rested()

    def look(self) -> None:
        """Begin a wave if this rank has requests. To be called whenever that may have changed."""
        if self.state is WaveState.RESTING and not self._is_held and self._want() is Want.RUN:
            self._begin()

    def start(self, wave: int) -> None:
        """Begin a wave that another rank has begun (START_DP_WAVE). A stale start, of a wave that this rank has begun
        too or that has ended, is ignored."""
        has_begun = self.state in (WaveState.VOTING, WaveState.RUNNING)
        # Reports say which wave has begun and not that one has: a lost, late or doubled start costs a delay or nothing.
        if wave > self.wave or (wave == self.wave and not has_begun):
            self.call()

    def call(self) -> None:
        """Begin a wave as soon as possible, whether or not this rank has requests: it was resumed, or the group
        changes."""
        if self.state is WaveState.RESTING:
            self._begin()
        elif self.state in (WaveState.VOTING, WaveState.NEW, WaveState.LOST):
            self._is_called = True

    def resize(self, target: int) -> None:
        """Ask for a group of ``target`` ranks. It changes with a vote in which all members ask for the same."""
        self.target = target
        self.call()

    def stepped(self) -> None:
        """Count a step, and vote when it is time."""
        self.step += 1
        if self.step % STEPS_BETWEEN_VOTES == 0:
            self._vote()

    def decided(self, outcome: Outcome) -> None:
        """Take the outcome of the vote that was cast."""
        assert self.state in (WaveState.VOTING, WaveState.LOST), outcome
        assert (outcome.wave, outcome.step) == (self.wave, self.step), outcome
        self.size = outcome.size
        if self.rank >= self.size:
            self.state = WaveState.REMOVED
        elif outcome.verdict is VoteVerdict.RUN:
            self.state = WaveState.RUNNING
        else:
            self.wave, self.step, self.state = self.wave + 1, 0, WaveState.RESTING
            # A paused rank cannot compute, and the others would hang in a step that waits for it: they rest until it
            # calls.
            self._is_held = outcome.verdict is VoteVerdict.HELD
            self._rested()

    def _rested(self) -> None:
        if self.state is WaveState.RESTING and self._is_called:
            self._begin()
        self.look()

    def _begin(self) -> None:
        self._is_called = self._is_held = False
        self._vote()

    def _vote(self) -> None:
        self.state = WaveState.VOTING
        self._cast(Vote(self.wave, self.step, self._want(), self.target))


class Ballot(Protocol):
    """Describes what a rank needs of its link to the group (:class:`.GroupLink`)."""

    def cast(self, vote: Vote) -> None:
        """Send a vote; its outcome arrives as a message."""

    def complain(self, epoch: int) -> None:
        """Say that a worker cannot reach another one of this roster; :class:`.Lost` arrives."""

    def key_of(self, roster: Roster) -> bytes:
        """Return the key by which the workers of a roster know each other."""

    def listen_again(self) -> None:
        """Speak to the hub: this rank knows that it is a member."""


class WaveLoop:
    """Runs the turns of one core. Belongs to the thread that steps it."""

    def __init__(self, core: EngineCore, config: ParallelConfig, ballot: Ballot) -> None:
        self._core = core
        self._ballot = ballot
        self._spreads_experts = config.spreads_experts_over_engines
        self._epoch = 0  # of the roster by which the workers have joined last
        self._has_earlier_step = False  # in flight: it was begun before they joined
        self.waves = Waves(config.data_parallel_rank, self._want, ballot.cast)
        self._reported: GroupState | None = None
        core.scheduler.hold(True)
        core.pausing.is_needed = lambda: not self.waves.is_resting
        core.pausing.on_resume = self._resumed

    def has_work(self) -> bool:
        """Return whether :meth:`turn` would do anything."""
        return self.waves.is_running or self._core.has_work()

    def turn(
        self, step: Callable[[], EngineCoreOutputs | None], compute_dummy: Callable[[], object]
    ) -> EngineCoreOutputs | None:
        """Run ``step`` if there is work for it. In a wave this computes exactly one batch: an empty one, by
        ``compute_dummy``, if no request could be scheduled."""
        num_before = self._core.num_begun
        outputs = step() if self._core.has_work() else None
        self._has_earlier_step = False  # each step of a core ends the oldest one in flight
        if self.waves.is_running:
            # Exactly one forward pass a turn: one fewer would leave the other ranks waiting in their exchange of rows,
            # one more would let this one wait.
            if self._core.num_begun == num_before:
                compute_dummy()
            self.waves.stepped()
        self.settle()
        return outputs

    def take(self, message: ToRank) -> None:
        """Take a message of the hub."""
        match message:
            case Welcome():
                self._ballot.listen_again()
                self.waves.welcome(message)
                self._regroup(message.roster)
            case Called():
                self.waves.start(message.wave)
            case Outcome():
                self._take_outcome(message)
            case Lost():
                self.waves.rest(message)
                self._regroup(message.roster)
            case Newcomers():
                if self.waves.target > self.waves.size or message.ranks[0] < self.waves.size:
                    self.waves.call()
            case Ended():
                pass  # its connection ends, which says the same
            case _:
                raise GroupLostError(f"unexpected message of the data-parallel group: {message}")
        self.settle()

    def resize(self, target: int) -> None:
        """Ask for a group of ``target`` ranks, as all ranks must. Raises ``ValueError`` if no group has so many."""
        if not 1 <= target <= MAX_RANKS:
            raise ValueError(f"a data-parallel group of {target} ranks; it has 1 to {MAX_RANKS}")
        self.waves.resize(target)
        self.settle()

    def break_off(self) -> None:
        """Compute nothing until the hub says how the group goes on: this rank has lost it."""
        self.waves.break_off()
        self.settle()

    def lost_peer(self, error: PeerLostError) -> None:
        """Compute nothing until the workers of all members have joined anew, because one cannot reach another one."""
        if self._has_earlier_step:
            # With overlapping steps another rank may have complained first. Complaining of the new members would let
            # all of them join once more, whose steps in flight then fail in turn.
            log.info("%s; the ranks of the data-parallel group have joined anew since then", error)
        else:
            self._complain(error)

    def _complain(self, error: PeerLostError) -> None:
        log.info("%s; the ranks of the data-parallel group join anew", error)
        self.waves.break_off()
        self._ballot.complain(self._epoch)
        self.settle()

    def _take_outcome(self, outcome: Outcome) -> None:
        if self.waves.state is WaveState.LOST and outcome.size > self.waves.rank:
            # This rank voted before its workers failed to join. The hub says how the group goes on once it has heard
            # that of the members that it knows now.
            if outcome.roster is not None:
                self._epoch = outcome.roster.epoch
                self._ballot.complain(self._epoch)
            return
        self.waves.decided(outcome)
        if self.waves.state is not WaveState.REMOVED:
            self._regroup(outcome.roster)
        elif self._spreads_experts:
            self._core.executor.collective_rpc("leave_experts")

    def _regroup(self, roster: Roster | None) -> None:
        """Let the workers join those of the other members, if the experts are spread over them and they have
        changed."""
        if roster is None or not self._spreads_experts:
            return
        self._epoch, self._has_earlier_step = roster.epoch, bool(self._core.steps_in_flight)
        index = roster.ranks.index(self.waves.rank)
        peers = ExpertPeers(index, roster.workers, roster.epoch, self._ballot.key_of(roster))
        try:
            self._core.executor.collective_rpc("join_experts", peers)
        except PeerLostError as error:
            self._complain(error)

    def settle(self) -> None:
        """Let what has changed take effect: requests may call for a wave, and a pause may be complete."""
        self.waves.look()
        self._core.scheduler.hold(not self.waves.is_running)
        if self.waves.is_resting:
            self._core.settle_pause()

    def take_updates(self) -> EngineCoreOutputs | None:
        """Return the state of the waves for the client, if it has changed since the last call."""
        waves = self.waves
        is_member = waves.state is not WaveState.NEW and waves.state is not WaveState.REMOVED
        state = GroupState(waves.size, is_member, start_wave=waves.started, wave_complete=waves.completed)
        if state == self._reported:
            return None
        self._reported = state
        return EngineCoreOutputs(group=state)

    def _resumed(self) -> None:
        """Begin a wave after a pause: other ranks may have waited for this one."""
        self.waves.call()
        self.settle()

    def _want(self) -> Want:
        core = self._core
        if core.pausing.is_paused and not core.scheduler.is_advancing:
            return Want.PAUSED
        return Want.RUN if core.has_requests() else Want.IDLE
