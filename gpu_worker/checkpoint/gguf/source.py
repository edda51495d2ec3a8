"""Reads the tensors of a GGUF file."""

import math
import mmap
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenloom.gguf.gguf_file import GgufTensor, read_gguf

from ..files.packed_weight import PackedWeight
from ..files.quantized_weight import QuantizedWeight
from .blocks import BLOCK_TYPES, PLAIN_TYPES, BlockType, type_error
from .names import places

_GATE = ".shared_expert_gate.weight"


# Our own reader: for 150,000 tokens with as many merges the package gguf takes 8.7 s of CPU and 475 MB in each process
# that needs the tokenizer, this 0.31 s.
class GgufSource:
    """Fulfils :class:`..weights.WeightSource` with a file that stays mapped."""

    def __init__(self, path: Path) -> None:
        head = read_gguf(path)
        self._path = path
        self.described_by = path.name
        self._tensors = head.tensors
        self._places = places(head)
        with path.open("rb") as file:
            # A private mapping is writable, which PyTorch asks for; nothing writes to it, so its pages stay the file's.
            self._content: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.views = [torch.frombuffer(self._content, dtype=torch.uint8)]

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        place = self._places[name]
        tensor = self._tensors[place.stored]
        if place.expert is not None:
            tensor = _of_expert(tensor, place.expert)
        if tensor.kind in PLAIN_TYPES:
            plain = self._bytes(tensor, tensor.shape, PLAIN_TYPES[tensor.kind].itemsize).view(PLAIN_TYPES[tensor.kind])
            if name.endswith(_GATE) and plain.dim() == 1:  # a matrix of one row
                return plain[None]
            return plain if place.heads is None else plain[_halves_of_heads(name, tensor.shape[0], place.heads)]
        if tensor.kind not in BLOCK_TYPES:
            raise type_error(place.stored, tensor.kind)
        if len(tensor.shape) != 2:
            raise ValueError(f"{place.stored} is quantized and has shape {list(tensor.shape)}: a matrix is expected")
        blocks = BLOCK_TYPES[tensor.kind]
        outputs, inputs = tensor.shape
        if inputs % blocks.size:
            raise ValueError(f"{place.stored} has rows of {inputs} numbers, {blocks.name} has blocks of {blocks.size}")
        stored = self._bytes(tensor, (outputs, inputs // blocks.size), blocks.bytes)
        order = None if place.heads is None else _halves_of_heads(name, outputs, place.heads)
        return PackedBlocks(stored, blocks, order)

    def close(self) -> None:
        self.views = []
        self._content = None  # the mapping ends with the last tensor that is a view of it

    def _bytes(self, tensor: GgufTensor, shape: tuple[int, ...], itemsize: int) -> Tensor:
        """Return a tensor's bytes, ``itemsize`` of them for each element of ``shape``: uint8 [..., last * itemsize].

        Raises ``ValueError`` if the file ends before that.
        """
        assert self._content is not None
        count = math.prod(shape) * itemsize
        if tensor.offset + count > len(self._content):
            raise ValueError(f"{self._path} ends within the tensor {tensor.name}: the file is not complete")
        octets = torch.frombuffer(self._content, dtype=torch.uint8, count=count, offset=tensor.offset)
        return octets.view(*shape[:-1], shape[-1] * itemsize)


@dataclass(frozen=True)
class PackedBlocks:
    """Fulfils :class:`..packed_weight.PackedWeight` with rows of blocks."""

    stored: Tensor
    """[out, bytes of a row] uint8."""
    type: BlockType
    order: Tensor | None
    """[out]: which stored row is each row of the weight; None: the same."""
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.stored.shape[1] // self.type.bytes * self.type.size

    @property
    def bits(self) -> int:
        return self.type.bits

    @property
    def group(self) -> int:
        return self.type.group

    @property
    def has_offsets(self) -> bool:
        return self.type.has_offsets

    def rows(self, first: int, last: int) -> Tensor:
        return self._some(first, last).dequantize()

    def quantized(self) -> QuantizedWeight:
        return self._some(0, self.shape[0])

    def _some(self, first: int, last: int) -> QuantizedWeight:
        some = self.stored[first:last] if self.order is None else self.stored[self.order[first:last]]
        values, scales, offsets = self.type.unpack(some.view(-1, self.type.bytes))
        inputs, count = self.shape[1], last - first
        by_group = None if offsets is None else offsets.view(count, -1)
        return QuantizedWeight(values.view(count, inputs), scales.view(count, -1), by_group, self.type.group)


def _of_expert(tensor: GgufTensor, expert: int) -> GgufTensor:
    """Return where one expert's matrix lies in a tensor [experts, out, in]."""
    _, outputs, inputs = tensor.shape
    if tensor.kind in PLAIN_TYPES:
        row = inputs * PLAIN_TYPES[tensor.kind].itemsize
    elif tensor.kind in BLOCK_TYPES:
        row = inputs // BLOCK_TYPES[tensor.kind].size * BLOCK_TYPES[tensor.kind].bytes
    else:
        raise type_error(tensor.name, tensor.kind)
    return replace(tensor, shape=(outputs, inputs), offset=tensor.offset + expert * outputs * row)


def _halves_of_heads(name: str, rows: int, heads: int) -> Tensor:
    """Return which stored row is each row of a query or key projection, whose first half of a head's rows is stored at
    the even places of the head and the second half at the odd ones."""
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise ValueError(f"{name} has {rows} rows, which are not those of {heads} heads of an even size")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
