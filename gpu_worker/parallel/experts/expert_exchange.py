"""Sends each token's rows to the ranks that hold its experts, and what they compute back.

The ranks are those of a data-parallel group, which compute their steps together
(``engine_core/data_parallel/wave_loop.py``): each calls :meth:`ExpertExchange.compute` once in every layer with
experts, with rows of its own or with none.

With several workers in a stage of an engine, each has a part of the experts of the stage's layers, and exchanges rows
with the workers of the same number of that stage in the other engines: all workers of a stage have the same rows, and
the sum over them is that of all experts.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import ExpertPeers

from .grouped_rows import GroupedRows

if TYPE_CHECKING:  # engines with all experts import none of it
    from .peer_mesh import PeerLink, PeerListener, PeerMesh

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

    def compute(self, rows: Tensor, grouped: GroupedRows, count: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return what the experts compute of ``rows`` [n, hidden_size], in the same order; zeros for those of other
        workers of this engine. Raises :class:`PeerLostError`.

        Args:
            rows: Contiguous, and sorted by the place of their expert, as ``grouped`` says.
            count: Places of experts in the layer, on all ranks.
            run: Computes rows of the expert at one of this worker's places.
        """
        # Ranks start in any order, so profile and warm-up must not wait for each other: they compute the own experts'
        # rows only.
        if self._mesh is None:
            return self._compute_alone(rows, grouped, count, run)
        sent = np.zeros(count, np.int64)
        sent[grouped.experts] = grouped.counts
        ends = np.concatenate((np.zeros(1, np.int64), sent.cumsum()))
        columns = [self._part(rank * self._num_workers + self._worker, count) for rank in range(self.size)]
        bounds = [(int(ends[each.start]), int(ends[each.stop])) for each in columns]
        # Counts first: they say how much arrives. Sending rows to experts moves them twice; gathering all tokens on
        # every rank would move each of them to all.
        arriving = self._exchange_counts(self._mesh, sent, columns)
        self._check(arriving, rows)
        per_rank = arriving.sum(1).tolist()
        arrived = rows.new_empty((sum(per_rank), *rows.shape[1:]))
        sources = [rows[first:end] for first, end in bounds]
        parts = list(arrived.split_with_sizes(per_rank))
        self._exchange(self._mesh, sources, parts)
        own = columns[self.rank]
        numbers = torch.arange(own.start, own.stop).repeat(self.size)
        numbers = numbers.repeat_interleave(torch.from_numpy(arriving.reshape(-1)))
        computed = _run_grouped(arrived, GroupedRows.sort(numbers), run)
        results = torch.zeros_like(rows) if self._num_workers > 1 else torch.empty_like(rows)
        self._exchange(
            self._mesh, list(computed.split_with_sizes(per_rank)), [results[first:end] for first, end in bounds]
        )
        return results

    def _part(self, part: int, count: int) -> range:
        return range(count * part // self.num_parts, count * (part + 1) // self.num_parts)

    def _exchange_counts(
        self, mesh: "PeerMesh", sent: "np.ndarray[tuple[int], np.dtype[np.int64]]", columns: list[range]
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """Return [size, own places]: the rows that each rank has for each of this worker's experts."""
        from .peer_mesh import byte_view

        own = columns[self.rank]
        arriving = np.zeros((self.size, len(own)), np.int64)
        arriving[self.rank] = sent[own.start : own.stop]
        mesh.swap(
            {self._peer(rank): byte_view(sent[each.start : each.stop]) for rank, each in enumerate(columns)},
            {self._peer(rank): byte_view(arriving[rank]) for rank in range(self.size)},
        )
        return arriving

    def _check(self, arriving: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", rows: Tensor) -> None:
        width = rows.element_size() * rows.shape[1]
        counts = arriving.reshape(-1).tolist()  # Python's integers: the sum of large ones would be a small one
        if min(counts, default=0) < 0 or sum(counts) * width > _MOST_BYTES:
            self.leave()
            raise PeerLostError(f"workers that share the experts announced {arriving.tolist()} rows")

    def _exchange(self, mesh: "PeerMesh", sent: list[Tensor], received: list[Tensor]) -> None:
        """Send ``sent[r]`` to each rank r, and fill ``received[r]`` with what it sends."""
        received[self.rank].copy_(sent[self.rank])
        mesh.swap(
            {self._peer(rank): _bytes_of(each) for rank, each in enumerate(sent)},
            {self._peer(rank): _bytes_of(each) for rank, each in enumerate(received)},
        )

    def _peer(self, rank: int) -> int:
        """Return the number of the worker of another engine with which this one exchanges rows."""
        return rank * self._num_workers + self._worker

    def _compute_alone(
        self, rows: Tensor, grouped: GroupedRows, count: int, run: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        own, results = self.own(count), torch.zeros_like(rows)
        for expert, part, result in zip(
            grouped.experts,
            rows.split_with_sizes(grouped.counts),
            results.split_with_sizes(grouped.counts),
            strict=True,
        ):
            if expert in own:
                result.copy_(run(expert, part))
        return results


def _bytes_of(x: Tensor) -> memoryview:
    """Return the bytes of contiguous rows, of any dtype."""
    return x.view(torch.uint8).numpy().reshape(-1).data if x.numel() else memoryview(b"")


def _run_grouped(rows: Tensor, grouped: GroupedRows, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return what the experts compute of rows that are not sorted."""
    results = torch.empty_like(rows)
    if grouped.experts:
        parts = rows[grouped.order].split_with_sizes(grouped.counts)
        computed = [run(expert, part) for expert, part in zip(grouped.experts, parts, strict=True)]
        results[grouped.order] = torch.cat(computed).to(rows.dtype)
    return results
