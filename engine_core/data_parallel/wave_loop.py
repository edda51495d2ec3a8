"""Joins a core to the waves of its data-parallel group: when it computes, what it votes, and what its client learns."""

from collections.abc import Callable
from typing import Protocol

from ..core import EngineCore
from ..data.config import ParallelConfig
from ..data.errors import GroupLostError
from ..data.messages import EngineCoreOutputs, GroupState
from .messages import MAX_RANKS, Called, Newcomers, Outcome, ToRank, Vote, Want, Welcome
from .waves import Waves, WaveState


class Ballot(Protocol):
    """Describes what a rank needs of its link to the group (:class:`.GroupLink`)."""

    def cast(self, vote: Vote) -> None:
        """Send a vote; its outcome arrives as a message."""


class WaveLoop:
    """Runs the turns of one core. Belongs to the thread that steps it."""

    def __init__(self, core: EngineCore, config: ParallelConfig, ballot: Ballot) -> None:
        self._core = core
        self._spreads_experts = config.spreads_experts_over_engines
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
                if self._spreads_experts:
                    self._core.executor.collective_rpc("join_experts", message.rendezvous)
                self.waves.welcome(message)
            case Called():
                self.waves.start(message.wave)
            case Outcome():
                self.waves.decided(message)
            case Newcomers():
                if self.waves.target > self.waves.size:
                    self.waves.call()
            case _:
                raise GroupLostError(f"unexpected message of the data-parallel group: {message}")
        self.settle()

    def resize(self, target: int) -> None:
        """Ask for a group of ``target`` ranks, as all ranks must. Raises ``ValueError`` if that is not supported."""
        if self._spreads_experts and target != self.waves.size:
            raise ValueError("the experts are spread over the ranks; start the group again with another size")
        if not 1 <= target <= MAX_RANKS:
            raise ValueError(f"a data-parallel group of {target} ranks; it has 1 to {MAX_RANKS}")
        self.waves.resize(target)
        self.settle()

    def settle(self) -> None:
        """Let what has changed take effect: requests may call for a wave, and a pause may be complete."""
        self.waves.look()
        self._core.scheduler.hold(not self.waves.is_running)
        if self.waves.is_resting:
            self._core.settle_pause()

    def take_news(self) -> EngineCoreOutputs | None:
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
