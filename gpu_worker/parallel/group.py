"""Lets the ranks of an engine exchange tensors. A rank that is alone exchanges none, and makes no call."""

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor


class RankGroup(Protocol):
    """Joins ranks that make the same calls in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add the tensors of all ranks. Returns the sum, of the same bits on every rank; may overwrite ``x``."""

    def all_max(self, x: Tensor) -> Tensor:
        """Return the largest of each element of all ranks' int32 tensors; may overwrite ``x``."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks in the order of their ranks, [size, ...]; all have the shape of ``x``."""

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        """Fill ``out`` [n, width] of the first rank, None on the others, with the columns that the ranks have: ``x`` of
        rank r are those from ``width * r // size`` on. All are float32, without gaps."""


class Peers(Protocol):
    """Sends tensors from one rank of the engine to another, in order."""

    def send(self, x: Tensor, rank: int) -> None:
        """Send a tensor, which nothing may change any more. Returns at once."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Wait for the next tensor of this shape and dtype from ``rank``."""


class Alone:
    """Fulfils :class:`RankGroup` for a rank that computes every layer by itself."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def gather_columns(self, x: Tensor, out: Tensor | None = None, *, width: int) -> None:
        if out is not None:
            out.copy_(x)


ALONE: Final[RankGroup] = Alone()
