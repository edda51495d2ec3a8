"""Reads the tensors of a GGUF file: maps their names to those of Hugging Face's classes, and says which rows were
reordered."""

import math
import mmap
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tokenloom.gguf.gguf_file import GgufFile, GgufTensor, read_gguf

from ..files.quantized_weight import PackedWeight, QuantizedWeight
from .blocks import BLOCK_TYPES, PLAIN_TYPES, BlockType
from .config import ROPE_FACTORS, has_experts, type_error

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors [experts, out, in] that hold a matrix of every expert of a layer."""
_IN_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Says where a tensor is found."""

    stored: str
    """The tensor's name in the file."""
    heads: int | None
    """Not None: the rows of each of so many heads are stored in pairs, as llama.cpp rotates Llama's."""
    expert: int | None = None
    """Not None: the tensor holds the matrices of all experts, and this one is meant."""


def places(file: GgufFile) -> dict[str, TensorPlace]:
    """Return the file's tensors by the names that models ask for. A tensor that has none keeps its own name."""
    architecture = file.metadata["general.architecture"]
    heads = dict.fromkeys(("attn_q", "attn_k"))
    if architecture == "llama":
        queries = file.metadata.get("llama.attention.head_count")
        heads = {"attn_q": queries, "attn_k": file.metadata.get("llama.attention.head_count_kv", queries)}
    found = {}
    for name in file.tensors.keys() - {ROPE_FACTORS}:
        found[_WHOLE_MODEL.get(name, name)] = TensorPlace(name, None)
        block, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        if name.startswith("blk.") and part in _OF_A_LAYER:
            del found[name]
            found[f"model.layers.{block}.{_OF_A_LAYER[part]}.{kind}"] = TensorPlace(name, heads.get(part))
        elif name.startswith("blk.") and part in _OF_EXPERTS and len(shape := file.tensors[name].shape) == 3:
            del found[name]
            for expert in range(shape[0]):
                own = f"model.layers.{block}.mlp.experts.{expert}.{_OF_EXPERTS[part]}.{kind}"
                found[own] = TensorPlace(name, None, expert)
    is_mixtral = architecture == "llama" and has_experts(file)
    return {_mixtral_name(name): place for name, place in found.items()} if is_mixtral else found


def _mixtral_name(name: str) -> str:
    """Return the name that Mixtral's class has for what Qwen's classes call ``name``."""
    before, between, after = name.partition(".mlp.")
    for own, mixtral in _IN_MIXTRAL.items():
        after = after.replace(own, mixtral)
    return f"{before}.block_sparse_moe.{after}" if between else name


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
