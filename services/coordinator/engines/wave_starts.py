"""Decides which ranks of a data-parallel group are asked to begin a wave. No I/O."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RankState:
    """What one rank has reported, and was asked.

    Attributes:
        started: The wave that it has begun; None at rest.
        completed: The last wave that has ended for it; -1 before the first.
        asked: The last wave that it was asked to begin; -1: none.
    """

    started: int | None = None
    completed: int = -1
    asked: int = -1


@dataclass(slots=True)
class WaveStarts:
    """Holds the ranks of one group that are joined. A rank is asked to begin the wave that another one has begun.

    The decision follows from the latest reports alone, so that a lost or late report, or another coordinator, delays a
    start and never loses it. A start that comes too late is stale: the rank ignores it.
    """

    ranks: dict[str, RankState] = field(default_factory=dict)
    """By the name of the engine."""

    def report(self, name: str, started: int | None, completed: int | None) -> None:
        """Take a rank's report."""
        state = self.ranks.setdefault(name, RankState())
        state.started, state.completed = started, -1 if completed is None else completed

    def leave(self, name: str) -> None:
        """Forget a rank, or what it was asked: a rank that joins again is asked again."""
        self.ranks.pop(name, None)

    def due(self) -> list[tuple[str, int]]:
        """Return who must begin which wave, and note that they were asked."""
        # The latest one: a rank that reports an older wave has not yet seen that the others went on.
        wave = max((state.started for state in self.ranks.values() if state.started is not None), default=None)
        if wave is None:
            return []
        due = [
            name
            for name, state in self.ranks.items()
            if state.started is None and state.completed < wave and state.asked < wave
        ]
        for name in due:
            self.ranks[name].asked = wave
        return [(name, wave) for name in due]
