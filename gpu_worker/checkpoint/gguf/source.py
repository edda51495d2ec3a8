"""Reads the tensors of a GGUF file, in the shapes and with the numbers that Hugging Face's classes have."""

import math
import mmap
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenloom.gguf.gguf_file import GgufFile, GgufTensor, read_gguf

from ..files.quantized_weight import Float4Weight, PackedWeight, QuantizedWeight
from .blocks import BLOCK_TYPES, MXFP4, PLAIN_TYPES, BlockType, floats4
from .config import type_error
from .names import places

_GATE = ".shared_expert_gate.weight"
_CONVOLUTIONS = (".conv.conv.weight", ".conv1d.weight", *(f".{part}_conv1d.weight" for part in "qkv"))
_RATES, _DELTA = ".A_log", ".linear_attn."
_VECTORS = (_RATES, *(f".{part}.{name}" for part in ("mamba", "mixer") for name in ("D", "norm.weight")))
"""Stored as matrices, of one column or with a row for each group."""


# Our own reader: for 150,000 tokens with as many merges the package gguf takes 8.7 s of CPU and 475 MB in each process
# that needs the tokenizer, this 0.31 s.
class GgufSource:
    """Fulfils :class:`..weights.WeightSource` with files that stay mapped."""

    def __init__(self, path: Path) -> None:
        head = read_gguf(path)
        self.described_by = head.path.name
        self._tensors = head.tensors
        self._places = places(head)
        self._value_heads = ValueHeads.of(head)
        self._contents = {part: _map(part) for part in head.parts}
        self.views = [torch.frombuffer(content, dtype=torch.uint8) for content in self._contents.values()]

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        place = self._places[name]
        if place.values is not None:
            return self._by_head(place.stored, place.values)
        tensor = self._tensors[place.stored]
        if place.expert is not None:
            tensor = _of_expert(tensor, place.expert)
        if tensor.kind in PLAIN_TYPES:
            plain = _as_in_class(name, self._plain(tensor) - place.shift if place.shift else self._plain(tensor))
            if self._value_heads is not None and _DELTA in name:
                return self._value_heads.sort(name, plain)
            return plain if place.heads is None else plain[_halves_of_heads(name, tensor.shape[0], place.heads)]
        if len(tensor.shape) != 2:
            raise ValueError(f"{place.stored} is quantized and has shape {list(tensor.shape)}: a matrix is expected")
        if self._value_heads is not None and _DELTA in name:
            return self._value_heads.sort(name, self._packed(tensor))
        order = None if place.heads is None else _halves_of_heads(name, tensor.shape[0], place.heads)
        return self._packed(tensor, order)

    def _plain(self, tensor: GgufTensor) -> Tensor:
        dtype = PLAIN_TYPES[tensor.kind]
        return self._bytes(tensor, tensor.shape, dtype.itemsize).view(dtype)

    def _packed(self, tensor: GgufTensor, order: Tensor | None = None) -> "PackedBlocks":
        """Return a matrix of blocks; of more dimensions all but the last are its rows."""
        if tensor.kind not in BLOCK_TYPES:
            raise type_error(tensor.name, tensor.kind)
        blocks = BLOCK_TYPES[tensor.kind]
        *rows, inputs = tensor.shape
        if inputs % blocks.size:
            raise ValueError(f"{tensor.name} has rows of {inputs} numbers, {blocks.name} has blocks of {blocks.size}")
        stored = self._bytes(tensor, (math.prod(rows), inputs // blocks.size), blocks.bytes)
        return (PackedFloatBlocks if blocks is MXFP4 else PackedBlocks)(stored, blocks, order)

    def _by_head(self, keys: str, values: str) -> "KeysAndValues":
        tensors = [self._tensors[name] for name in (keys, values) if name in self._tensors]
        if len(tensors) < 2 or [len(tensor.shape) for tensor in tensors] != [3, 3]:
            raise ValueError(f"{keys} and {values} must be two tensors of three dimensions")
        (heads, inputs, key_size), (_, value_size, _) = (tensor.shape for tensor in tensors)
        if tensors[1].shape != (heads, value_size, inputs):
            raise ValueError(f"{values} must have {heads} heads of {inputs} inputs, as {keys} has")
        first, second = (self._plain(each) if each.kind in PLAIN_TYPES else self._packed(each) for each in tensors)
        return KeysAndValues(first, second, heads, key_size, value_size, inputs)

    def close(self) -> None:
        self.views = []
        self._contents = {}  # a mapping ends with the last tensor that is a view of it

    def _bytes(self, tensor: GgufTensor, shape: tuple[int, ...], itemsize: int) -> Tensor:
        """Return a tensor's bytes, ``itemsize`` of them for each element of ``shape``: uint8 [..., last * itemsize].

        Raises ``ValueError`` if the file ends before that.
        """
        content, count = self._contents[tensor.path], math.prod(shape) * itemsize
        if tensor.offset + count > len(content):
            raise ValueError(f"{tensor.path} ends within the tensor {tensor.name}: the file is not complete")
        octets = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=tensor.offset)
        return octets.view(*shape[:-1], shape[-1] * itemsize)


def _as_in_class(name: str, plain: Tensor) -> Tensor:
    """Return a tensor with the shape and the numbers that Hugging Face's class has."""
    if name.endswith(_GATE) and plain.dim() == 1:  # a matrix of one row
        return plain[None]
    if name.endswith(_CONVOLUTIONS):  # [channels, 1, taps] without the middle, or with another one before
        return plain.reshape(-1, 1, plain.shape[-1])
    if not name.endswith(_VECTORS):
        return plain
    if not name.endswith(_RATES):
        return plain.flatten()
    # Rates are stored as minus their power of e. Those of Kimi-Linear have a dimension for each of a step's.
    rates = torch.log(-plain).flatten()
    return rates.view(1, 1, -1, 1) if ".self_attn." in name else rates


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # A private mapping is writable, which PyTorch asks for; nothing writes to it, so its pages stay the file's.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True)
class ValueHeads:
    """Sorts the heads of values of a gated delta net, which llama.cpp stores by their number within a head of keys: the
    first of each, then the second of each."""

    groups: int
    """Heads of keys."""
    heads: int
    size: int
    rows_before: int
    """Of queries and keys, before those of values."""

    @classmethod
    def of(cls, file: GgufFile) -> "ValueHeads | None":
        """Return those of a file; None: it has no gated delta net."""
        metadata, name = file.metadata, f"{file.metadata['general.architecture']}.ssm."
        if name not in ("qwen35.ssm.", "qwen35moe.ssm."):
            return None
        groups, heads = metadata[f"{name}group_count"], metadata[f"{name}time_step_rank"]
        return cls(groups, heads, metadata[f"{name}inner_size"] // heads, 2 * groups * metadata[f"{name}state_size"])

    def sort(self, name: str, stored: "Tensor | PackedBlocks") -> "Tensor | PackedBlocks":
        """Return a tensor of the net with its heads in the order of Hugging Face's class."""
        if self.heads == self.groups:
            return stored
        match name.partition(_DELTA)[2]:
            case "in_proj_qkv.weight" | "conv1d.weight":
                before = torch.arange(self.rows_before)
                return _by_rows(stored, torch.cat((before, self.rows_before + self._order(self.size))))
            case "in_proj_z.weight":
                return _by_rows(stored, self._order(self.size))
            case "in_proj_a.weight" | "in_proj_b.weight" | "A_log" | "dt_bias":
                return _by_rows(stored, self._order(1))
            case "out_proj.weight":
                whole = stored if isinstance(stored, Tensor) else stored.rows(0, stored.shape[0])
                return whole[:, self._order(self.size)]
        return stored

    def _order(self, size: int) -> Tensor:
        stored = torch.arange(self.heads * size).view(self.heads // self.groups, self.groups, size)
        return stored.transpose(0, 1).flatten()


def _by_rows(stored: "Tensor | PackedBlocks", order: Tensor) -> "Tensor | PackedBlocks":
    return stored[order] if isinstance(stored, Tensor) else replace(stored, order=order)


@dataclass(frozen=True)
class PackedBlocks:
    """Fulfils :class:`..files.quantized_weight.PackedWeight` with rows of blocks."""

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

    def _blocks(self, first: int, last: int) -> Tensor:
        some = self.stored[first:last] if self.order is None else self.stored[self.order[first:last]]
        return some.view(-1, self.type.bytes)

    def _some(self, first: int, last: int) -> QuantizedWeight:
        values, scales, offsets = self.type.unpack(self._blocks(first, last))
        inputs, count = self.shape[1], last - first
        by_group = None if offsets is None else offsets.view(count, -1)
        return QuantizedWeight(values.view(count, inputs), scales.view(count, -1), by_group, self.type.group)


class PackedFloatBlocks(PackedBlocks):
    """Fulfils :class:`..files.quantized_weight.PackedFloats4` too: twice the floats are integers in groups, which they
    are taken for beside weights of other types."""

    def whole(self) -> Float4Weight:
        return floats4(self._blocks(0, self.shape[0]), self.shape[0])


@dataclass(frozen=True)
class KeysAndValues:
    """Fulfils :class:`..files.quantized_weight.PackedWeight` with a matrix whose rows, first those of a head's keys and
    then those of its values, are from two tensors, of which the one of keys is transposed."""

    keys: Tensor | PackedBlocks
    """[heads, in, key_size], or so many rows of blocks."""
    values: Tensor | PackedBlocks
    """[heads, value_size, in]."""
    heads: int
    key_size: int
    value_size: int
    inputs: int
    bits: int = 16
    group: None = None
    has_offsets: bool = False
    rounds_inputs: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads * (self.key_size + self.value_size), self.inputs

    def rows(self, first: int, last: int) -> Tensor:
        size = self.key_size + self.value_size
        begin, end = first // size, -(-last // size)
        keys = self._of_heads(self.keys, begin, end, self.inputs, self.key_size).transpose(1, 2)
        values = self._of_heads(self.values, begin, end, self.value_size, self.inputs)
        return torch.cat((keys, values), 1).flatten(0, 1)[first - begin * size : last - begin * size]

    def _of_heads(self, part: Tensor | PackedBlocks, begin: int, end: int, rows: int, columns: int) -> Tensor:
        some = part[begin:end] if isinstance(part, Tensor) else part.rows(begin * rows, end * rows)
        return some.float().view(end - begin, rows, columns)

    def quantized(self) -> QuantizedWeight:
        raise AssertionError("the two parts of a head share no groups")


def _of_expert(tensor: GgufTensor, expert: int) -> GgufTensor:
    """Return where one expert's matrix, or its bias, lies in a tensor [experts, out, in] or [experts, out]."""
    *rows, inputs = tensor.shape[1:]
    if tensor.kind in PLAIN_TYPES:
        row = inputs * PLAIN_TYPES[tensor.kind].itemsize
    elif tensor.kind in BLOCK_TYPES:
        row = inputs // BLOCK_TYPES[tensor.kind].size * BLOCK_TYPES[tensor.kind].bytes
    else:
        raise type_error(tensor.name, tensor.kind)
    return replace(tensor, shape=(*rows, inputs), offset=tensor.offset + expert * math.prod(rows) * row)


def _halves_of_heads(name: str, rows: int, heads: int) -> Tensor:
    """Return which stored row is each row of a query or key projection, whose first half of a head's rows is stored at
    the even places of the head and the second half at the odd ones."""
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise ValueError(f"{name} has {rows} rows, which are not those of {heads} heads of an even size")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
