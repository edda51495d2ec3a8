"""Sends each token's rows to the ranks that hold its experts, and what they compute back.

The ranks are those of a data-parallel group, which compute their steps together
(``engine_core/data_parallel/wave_loop.py``): each calls :meth:`ExpertExchange.compute` once in every layer with
experts, with rows of its own or with none.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from .grouped_rows import GroupedRows

if TYPE_CHECKING:  # engines that do not move experts import none of it
    from .balancer import ExpertBalancer
    from .transfer import WeightLink


class ExpertMeeting(Protocol):
    """Where the ranks that share experts find each other."""

    def gloo(self, name: str) -> Any:
        """Join the others in a process group for the CPU. Raises ``RuntimeError`` if they do not come in time."""

    def link(self, name: str) -> "WeightLink":
        """Join the others in a group that carries weights. Raises as :meth:`gloo`."""


class ExpertExchange:
    """Exchanges the rows of one rank. Before :meth:`join` it computes only rows for this rank's own experts: profile
    runs and warm-up are not made together."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend: Any = None

    def experts(self, rank: int, count: int) -> range:
        """Return which of ``count`` places of experts a rank holds."""
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def join(self, meeting: ExpertMeeting, balancer: "ExpertBalancer | None" = None) -> None:
        """Join the other ranks, and wait for them. ``balancer`` moves the experts from now on."""
        self._backend = meeting.gloo("experts")
        if balancer is not None:
            balancer.join(meeting.link("moves"))
        self._backend.barrier().wait()

    def compute(self, rows: Tensor, grouped: GroupedRows, count: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Return what the experts compute of ``rows`` [n, hidden_size], in the same order.

        Args:
            rows: Sorted by the place of their expert, as ``grouped`` says.
            count: Places of experts in the layer, on all ranks.
            run: Computes rows of the expert at one of this rank's places.
        """
        # Ranks start in any order, so profile and warm-up must not wait for each other: they compute the own experts'
        # rows only.
        if self._backend is None:
            return self._compute_alone(rows, grouped, count, run)
        sent = torch.zeros(count, dtype=torch.int64)
        sent[grouped.experts] = torch.tensor(grouped.counts, dtype=torch.int64)
        widths = [len(self.experts(rank, count)) for rank in range(self.size)]
        own = self.experts(self.rank, count)
        # Counts first: all-to-all needs the sizes of what arrives. Sending rows to experts moves them twice; gathering
        # all tokens on every rank would move each of them to all.
        received = self._exchange(sent, widths, [len(own)] * self.size).view(self.size, len(own))
        from_here = [int(part.sum()) for part in sent.split_with_sizes(widths)]
        to_here = received.sum(1).tolist()
        arrived = self._exchange(rows, from_here, to_here)
        numbers = torch.arange(own.start, own.stop).repeat(self.size).repeat_interleave(received.flatten())
        return self._exchange(_run_grouped(arrived, GroupedRows.sort(numbers), run), to_here, from_here)

    def _compute_alone(
        self, rows: Tensor, grouped: GroupedRows, count: int, run: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        own, results = self.experts(self.rank, count), torch.zeros_like(rows)
        for expert, part, result in zip(
            grouped.experts,
            rows.split_with_sizes(grouped.counts),
            results.split_with_sizes(grouped.counts),
            strict=True,
        ):
            if expert in own:
                result.copy_(run(expert, part))
        return results

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send ``sent[r]`` entries of ``x`` to each rank r, in order; return ``received[r]`` entries of each."""
        result = x.new_empty((sum(received), *x.shape[1:]))
        width = x[:1].numel() * x.element_size() if len(x) else result[:1].numel() * x.element_size()
        # As bytes: the library exchanges no bfloat16.
        flat_in, flat_out = x.contiguous().view(torch.uint8).flatten(), result.view(torch.uint8).flatten()
        splits_in, splits_out = [n * width for n in sent], [n * width for n in received]
        self._backend.alltoall_base(flat_out, flat_in, splits_out, splits_in).wait()
        return result


def _run_grouped(rows: Tensor, grouped: GroupedRows, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return what the experts compute of rows that are not sorted."""
    results = torch.empty_like(rows)
    if grouped.experts:
        parts = rows[grouped.order].split_with_sizes(grouped.counts)
        computed = [run(expert, part) for expert, part in zip(grouped.experts, parts, strict=True)]
        results[grouped.order] = torch.cat(computed).to(rows.dtype)
    return results
