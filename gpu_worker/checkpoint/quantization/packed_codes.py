"""Holds a weight whose numbers are stored as unsigned integers with scales and zero points (GPTQ, AWQ, W4A16)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..files.packed_weight import from_codes
from ..files.quantized_weight import QuantizedWeight


class Codes(NamedTuple):
    """Holds some rows of a weight: (codes - zeros) * scales, with one zero point and scale for each group."""

    codes: Tensor
    """[rows, in] uint8."""
    zeros: Tensor | None
    """[rows, groups] uint8; None: the middle of the codes' range."""
    scales: Tensor
    """[rows, groups], floating."""


@dataclass(frozen=True)
class PackedCodes:
    """Fulfils :class:`~..packed_weight.PackedWeight`."""

    shape: tuple[int, int]
    bits: int
    group: int | None
    has_offsets: bool
    read: Callable[[int, int], Codes]
    """Return the rows from the first to before the second argument."""
    group_of_input: Tensor | None = None
    """[in] integers: the group of each input, if inputs of a group are not neighbours."""
    rounds_inputs: bool = False

    def rows(self, first: int, last: int) -> Tensor:
        part = self.read(first, last)
        if self.group is not None:
            return from_codes(*part, self.bits, self.group).dequantize()
        assert self.group_of_input is not None
        index = self.group_of_input.long()
        zeros = 1 << (self.bits - 1) if part.zeros is None else part.zeros.float()[:, index]
        return (part.codes.float() - zeros) * part.scales.float()[:, index]

    def quantized(self) -> QuantizedWeight:
        assert self.group is not None
        return from_codes(*self.read(0, self.shape[0]), self.bits, self.group)


def groups_of(inputs: int, group_size: int) -> tuple[int, int]:
    """Return (inputs that share a scale, number of groups); a group size of -1 means that all inputs share one."""
    group = inputs if group_size == -1 else group_size
    return group, -(-inputs // group)


def input_groups(inputs: int, group: int, stored: Tensor | None) -> Tensor | None:
    """Return the group of each input, or None if the groups are runs of ``group`` neighbours without a rest.

    ``stored`` is what the checkpoint says about it: [in] integers, or None.
    """
    in_order = torch.arange(inputs, dtype=torch.int32) // group
    if stored is None or torch.equal(stored.int(), in_order):
        return None if inputs % group == 0 else in_order
    return stored
