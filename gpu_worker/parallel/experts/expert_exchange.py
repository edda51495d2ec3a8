"""Sends each token's rows to the ranks that hold its experts, and what they compute back.

The ranks are those of a data-parallel group, which compute their steps together
(``engine_core/data_parallel/wave_loop.py``): each calls :meth:`ExpertExchange.compute` once in every layer with
experts, with rows of its own or with none.

With several workers in a stage of an engine, each has a part of the experts of the stage's layers, and exchanges rows
with the workers of the same number of that stage in the other engines: all workers of a stage have the same rows, and
the sum over them is that of all experts.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import ExpertPeers

from .grouped_rows import GroupedRows

if TYPE_CHECKING:  # engines with all experts import none of it
    from .peer_mesh import PeerLink, PeerListener, PeerMesh

RunExpert: TypeAlias = Callable[[int, Tensor], Tensor]
"""Computes rows [n, inputs] of the expert at a place, [n, outputs]."""
Counts: TypeAlias = npt.NDArray[np.int64]
_MOST_BYTES = 1 << 34
"""What the rows that arrive in one layer may take: a number of rows above it is none that a step has."""


class ExpertExchange:
    """Exchanges the rows of one worker. Before :meth:`join` it computes only rows for this worker's own experts:
    profile runs and warm-up are not made together.

    Attributes:
        rank: Of this engine among those that share the experts.
        size: How many those are.
    """

    def __init__(self, rank: int, size: int, worker: int = 0, num_workers: int = 1, stage: int = 0) -> None:
        """``worker``: of the ``num_workers`` of this stage of the engine."""
        self.rank, self.size = rank, size
        self._worker, self._num_workers = worker, num_workers
        self._stage = stage
        self._listener: PeerListener | None = None
        self._mesh: PeerMesh | None = None
        self._link: PeerLink | None = None

    @property
    def part(self) -> int:
        """Return which of :attr:`num_parts` this worker has."""
        return self.rank * self._num_workers + self._worker

    @property
    def num_parts(self) -> int:
        """Return into how many parts the experts are divided."""
        return self.size * self._num_workers

    def own(self, count: int) -> range:
        """Return which of ``count`` places of experts this worker holds."""
        return self._part(self.part, count)

    def listen(self, host: str) -> str:
        """Take connections of other workers at an address of this machine, and return ``HOST:PORT``."""
        from .peer_mesh import PeerListener

        if self._listener is None:
            self._listener = PeerListener(host)
        return self._listener.endpoint

    def place(self, peers: ExpertPeers) -> None:
        """Leave the other workers, and take this worker's place among ``peers``, whom it can :meth:`join` then."""
        self.leave()
        self.rank, self.size = peers.index, len(peers.workers)

    def join(self, peers: ExpertPeers) -> "PeerLink":
        """Connect to the other workers, and wait for them. Returns the way by which weights move. Raises
        :class:`PeerLostError` if one of them ends meanwhile."""
        from .peer_mesh import PeerLink, join_peers

        assert self._listener is not None, "listen comes first"
        # Stages have different layers: a worker's rows are for those of its own stage in the other engines.
        first = self._stage * self._num_workers
        stage = [workers[first : first + self._num_workers] for workers in peers.workers]
        self._mesh = join_peers(self._listener, self.part, msgspec.structs.replace(peers, workers=stage))
        self._link = PeerLink(self._mesh)
        return self._link

    def leave(self) -> None:
        """End the connections to the other workers. Idempotent."""
        if self._mesh is not None:
            self._mesh.close()
        if self._link is not None:
            self._link.close()
        self._mesh = self._link = None

    def close(self) -> None:
        """Leave the others for good. Idempotent."""
        self.leave()
        if self._listener is not None:
            self._listener.close()

    def compute(self, rows: Tensor, grouped: GroupedRows, count: int, run: RunExpert) -> Tensor:
        """Return what the experts compute of ``rows`` [n, hidden_size], in the same order; zeros for those of other
        workers of this engine. Raises :class:`PeerLostError`.

        Args:
            rows: Contiguous, and sorted by the place of their expert, as ``grouped`` says.
            count: Places of experts in the layer, on all ranks.
            run: Computes rows of the expert at one of this worker's places.
        """
        (trip,) = self.trips([grouped], count, rows.element_size() * rows.shape[1])
        return trip.carry(rows, run)

    def trips(self, groups: Sequence[GroupedRows], count: int, row_bytes: int) -> list["RowTrip"]:
        """Tell the other ranks how many rows of each group go to their experts. All ranks call it with equally many
        groups, and carry the rows of each equally often afterwards. Raises :class:`PeerLostError`.

        Args:
            groups: Rows that are sorted by the place of their expert.
            count: Places of experts in the layer, on all ranks.
            row_bytes: Bytes of the widest row that is carried.
        """
        sent = np.zeros((len(groups), count), np.int64)
        for counts, grouped in zip(sent, groups, strict=True):
            counts[grouped.experts] = grouped.counts
        # Ranks start in any order, so profile and warm-up must not wait for each other: they compute the own experts'
        # rows only.
        if self._mesh is None:
            own = self.own(count)
            return [RowTrip(None, 0, [0], [own], counts, counts[None, own.start : own.stop]) for counts in sent]
        columns = [self._part(rank * self._num_workers + self._worker, count) for rank in range(self.size)]
        # Counts first: they say how much arrives. Sending rows to experts moves them twice; gathering all tokens on
        # every rank would move each of them to all.
        arriving = self._exchange_counts(self._mesh, sent, columns)
        self._check(arriving, row_bytes)
        peers = [self._peer(rank) for rank in range(self.size)]
        return [
            RowTrip(self._mesh, self.rank, peers, columns, counts, arriving[:, index])
            for index, counts in enumerate(sent)
        ]

    def _part(self, part: int, count: int) -> range:
        return range(count * part // self.num_parts, count * (part + 1) // self.num_parts)

    def _exchange_counts(self, mesh: "PeerMesh", sent: Counts, columns: list[range]) -> Counts:
        """Return [size, groups, own places]: the rows of each group that each rank has for each of this worker's
        experts. ``sent`` [groups, places]: those of this rank."""
        from .peer_mesh import byte_view

        own = columns[self.rank]
        arriving = np.zeros((self.size, len(sent), len(own)), np.int64)
        arriving[self.rank] = sent[:, own.start : own.stop]
        parts = [np.ascontiguousarray(sent[:, each.start : each.stop]) for each in columns]
        mesh.swap(
            {self._peer(rank): byte_view(part) for rank, part in enumerate(parts)},
            {self._peer(rank): byte_view(arriving[rank]) for rank in range(self.size)},
        )
        return arriving

    def _check(self, arriving: Counts, row_bytes: int) -> None:
        counts = arriving.reshape(-1).tolist()  # as Python's integers, whose sum cannot overflow
        if min(counts, default=0) < 0 or sum(counts) * row_bytes > _MOST_BYTES:
            self.leave()
            raise PeerLostError(f"workers that share the experts announced {arriving.tolist()} rows")

    def _peer(self, rank: int) -> int:
        """Return the number of the worker of another engine with which this one exchanges rows."""
        return rank * self._num_workers + self._worker


class RowTrip:
    """Carries rows to the workers that hold their experts, and what those compute back."""

    def __init__(
        self,
        mesh: "PeerMesh | None",
        rank: int,
        peers: list[int],
        columns: list[range],
        sent: Counts,
        arriving: Counts,
    ) -> None:
        """``mesh``: None: only the rows of this worker's own experts are computed. ``peers`` and ``columns``: the
        number in the mesh, and the places of experts, of the worker of each rank; this is that of ``rank``. ``sent``
        [places] and ``arriving`` [ranks, own places]: numbers of rows."""
        self._mesh, self._rank, self._peers, self._columns = mesh, rank, peers, columns
        ends = np.concatenate((np.zeros(1, np.int64), sent.cumsum()))
        self._bounds = [(int(ends[each.start]), int(ends[each.stop])) for each in columns]
        self._per_rank = arriving.sum(1).tolist()
        own = columns[rank]
        numbers = torch.arange(own.start, own.stop).repeat(len(columns))
        self._grouped = GroupedRows.sort(numbers.repeat_interleave(torch.from_numpy(arriving.reshape(-1))))

    def reaches(self, place: int) -> bool:
        """Return whether the expert at a place computes rows of this worker; others of this engine send theirs to the
        other ones."""
        return any(place in each for each in self._columns)

    def carry(self, rows: Tensor, run: RunExpert, width: int | None = None) -> Tensor:
        """Return what the experts compute of ``rows`` [n, inputs], in the same order, [n, ``width``]; zeros where this
        worker reaches no expert. Raises :class:`PeerLostError`.

        Args:
            rows: Contiguous, those of the group in its order.
            run: Computes rows of the expert at one of this worker's places.
            width: None: that of ``rows``.
        """
        width = rows.shape[1] if width is None else width
        arrived = rows.new_empty(sum(self._per_rank), rows.shape[1])
        self._swap([rows[first:end] for first, end in self._bounds], self._split(arrived))
        computed = _run_grouped(arrived, self._grouped, run, width)
        num_reached = sum(end - first for first, end in self._bounds)
        results = (rows.new_empty if num_reached == len(rows) else rows.new_zeros)(len(rows), width)
        self._swap(self._split(computed), [results[first:end] for first, end in self._bounds])
        return results

    def _split(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split_with_sizes(self._per_rank))

    def _swap(self, sent: list[Tensor], received: list[Tensor]) -> None:
        """Send ``sent[r]`` to each rank r, and fill ``received[r]`` with what it sends."""
        received[self._rank].copy_(sent[self._rank])
        if self._mesh is not None:
            self._mesh.swap(
                {peer: _bytes_of(each) for peer, each in zip(self._peers, sent, strict=True)},
                {peer: _bytes_of(each) for peer, each in zip(self._peers, received, strict=True)},
            )


def _bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of contiguous rows, of any dtype."""
    return x.view(torch.uint8).numpy().reshape(-1).data if x.numel() else memoryview(b"")


def _run_grouped(rows: Tensor, grouped: GroupedRows, run: RunExpert, width: int) -> Tensor:
    """Return what the experts compute of rows that are not sorted, [n, width]."""
    results = rows.new_empty(len(rows), width)
    if grouped.experts:
        parts = rows[grouped.order].split_with_sizes(grouped.counts)
        computed = [run(expert, part) for expert, part in zip(grouped.experts, parts, strict=True)]
        results[grouped.order] = torch.cat(computed).to(rows.dtype)
    return results
