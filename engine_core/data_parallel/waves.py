"""Waves of a data-parallel group of a mixture-of-experts model, as one rank sees them. No I/O.

The experts of such a model may be spread over the ranks, so that a step of one rank needs a step of every other rank.
All ranks therefore compute together or rest together. A wave begins when a rank has a request, and ends when the ranks
agree that none has any. They vote before the first step and then every :data:`STEPS_BETWEEN_VOTES` steps; a rank
without requests computes a dummy batch in each step. (vLLM V1: ``DPEngineCoreProc``; its ranks vote by an all-reduce.)
"""

import enum
from collections.abc import Callable

from .messages import Outcome, Vote, VoteVerdict, Want, Welcome

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
        return self.state in (WaveState.RESTING, WaveState.REMOVED, WaveState.NEW)

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
        elif self.state in (WaveState.VOTING, WaveState.NEW):
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
        assert self.state is WaveState.VOTING, outcome
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
