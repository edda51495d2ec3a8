"""Sends the weights of moved experts to their new ranks, while these compute steps."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
        expert_bytes: What the largest expert takes; others are filled up with zeros, so that all ranks take the same
            turns.
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


class PendingMessage(Protocol):
    """Stands for a message that may still be on its way."""

    def wait(self) -> object:
        """Return when it has been sent, or has arrived. Raises ``RuntimeError`` if the other rank is lost."""


class WeightLink(Protocol):
    """Joins the ranks over which the experts are spread, beside what their steps exchange."""

    rank: int
    size: int

    def send(self, x: Tensor, rank: int, tag: int) -> PendingMessage:
        """Begin to send bytes, uint8 [n], which must not change before they are sent."""

    def receive(self, x: Tensor, rank: int, tag: int) -> PendingMessage:
        """Begin to fill ``x``, uint8 [n]."""

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors, int64, of all ranks."""


class MovableExperts(Protocol):
    """Holds the experts of one layer that are on this rank, by place."""

    def packed_bytes(self) -> int:
        """Return the most bytes that :meth:`pack` makes of one of them."""

    def pack(self, place: int) -> Tensor:
        """Return the weights of an expert as they are packed, as bytes of the host, uint8 [n]."""

    def prepare(self, place: int, data: Tensor) -> None:
        """Make another expert for a place, beside the one that it has, of what :meth:`pack` returned on its rank, and
        zeros that may follow."""

    def switch(self) -> int:
        """Use all prepared experts from the next step on. Returns how many they are."""

    def forget_prepared(self) -> None:
        """Drop the prepared experts."""


class LayerTransfer:
    """Carries out the moves of one layer, a turn for each step. All ranks take the same turns."""

    def __init__(self, link: WeightLink, moves: MoveList) -> None:
        self.moves = moves
        self._link = link
        self._sent: dict[int, Tensor] = {}  # bytes of experts, by their places
        self._received: dict[int, Tensor] = {}  # as _sent
        self._arriving: list[int] = []  # places whose last bytes are on their way
        self._pending: list[PendingMessage] = []
        self._turn = 0

    @property
    def is_complete(self) -> bool:
        """Return whether all weights have been sent."""
        return self._turn == self.moves.num_turns

    def post(self, layer: MovableExperts) -> None:
        """Begin to send and receive the next bytes."""
        for piece in self.moves.pieces(self._turn):
            self._post(piece, layer)
        self._turn += 1

    def settle(self) -> None:
        """Wait for what was begun."""
        while self._pending:
            self._pending.pop().wait()

    def prepare(self, layer: MovableExperts) -> None:
        """Make layers of the experts that have arrived."""
        while self._arriving:
            place = self._arriving.pop()
            layer.prepare(place, self._received.pop(place))

    def give_up(self) -> None:
        """Wait for what was begun, and free the memory, also if another rank is lost."""
        try:
            self.settle()
        finally:
            self._pending, self._sent, self._received, self._arriving = [], {}, {}, []

    def _post(self, piece: MovedPiece, layer: MovableExperts) -> None:
        rank, move, part = self._link.rank, piece.move, slice(piece.begin, piece.end)
        source, target = move.source // self.moves.per_rank, move.target // self.moves.per_rank
        if source == rank and move.source not in self._sent:
            self._sent[move.source] = _filled(layer.pack(move.source), self.moves.expert_bytes)
        if target == rank:
            if move.target not in self._received:
                # Beside the expert in use, because packed weights cannot be replaced in parts; the next layer begins
                # when this one has switched, which bounds the memory.
                self._received[move.target] = torch.empty(self.moves.expert_bytes, dtype=torch.uint8)
            if piece.end == self.moves.expert_bytes:
                self._arriving.append(move.target)
        if source == target == rank:
            self._received[move.target][part] = self._sent[move.source][part]
        elif source == rank:
            self._pending.append(self._link.send(self._sent[move.source][part], target, move.target))
        elif target == rank:
            self._pending.append(self._link.receive(self._received[move.target][part], source, move.target))


def _filled(data: Tensor, size: int) -> Tensor:
    """Return ``data``, uint8 [n], with zeros up to a size that all experts have."""
    return torch.nn.functional.pad(data, (0, size - len(data))) if len(data) < size else data
