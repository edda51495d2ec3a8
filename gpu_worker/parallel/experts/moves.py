"""Lists the weights that change their rank when a layer gets another placement. No I/O; equal on all ranks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .planner import Ints


@dataclass(frozen=True, slots=True)
class Move:
    """Says that one place takes over the expert of another one."""

    source: int
    """The place, counted over all ranks, that has the expert now."""
    target: int
    """The place that will have it."""


@dataclass(frozen=True, slots=True)
class MovedPiece:
    """Names a part of an expert's bytes that is sent in one step."""

    move: Move
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class MoveList:
    """Holds the moves of one layer.

    Attributes:
        moves: In the order of their targets.
        per_rank: Places of a rank.
        expert_bytes: Size of an expert.
        step_bytes: The most bytes that a rank receives in a step.
    """

    moves: tuple[Move, ...]
    per_rank: int
    expert_bytes: int
    step_bytes: int

    @property
    def num_turns(self) -> int:
        """Return in how many steps the weights are sent."""
        most = max(Counter(move.target // self.per_rank for move in self.moves).values(), default=0)
        return -(-most * self.expert_bytes // self.step_bytes)

    def pieces(self, turn: int) -> Iterator[MovedPiece]:
        """Yield what is sent in one step: of the bytes that a rank receives one after the other, the next ones."""
        # A step must not wait for megabytes: it begins to send so many bytes, and the next step waits for them.
        begin, end = turn * self.step_bytes, (turn + 1) * self.step_bytes
        received: Counter[int] = Counter()
        for move in self.moves:
            rank = move.target // self.per_rank
            start, received[rank] = received[rank], received[rank] + self.expert_bytes
            first, last = max(begin, start), min(end, received[rank])
            if first < last:
                yield MovedPiece(move, first - start, last - start)


def moves_between(current: Ints, planned: Ints, per_rank: int) -> tuple[Move, ...]:
    """Return the moves that turn one placement [num_places] into another. Of several ranks that have an expert, the one
    that sends least so far sends it."""
    holders: dict[int, list[int]] = {}
    for place, expert in enumerate(current.tolist()):
        holders.setdefault(expert, []).append(place)
    num_sent: Counter[int] = Counter()
    moves = []
    for target in (current != planned).nonzero()[0].tolist():
        source = min(holders[int(planned[target])], key=lambda place: (num_sent[place // per_rank], place))
        num_sent[source // per_rank] += 1
        moves.append(Move(source, target))
    return tuple(moves)
