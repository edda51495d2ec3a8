"""Gives each expert of a layer tensors of its own, where the files hold one tensor for all of them (gpt-oss, Qwen3-VL
and Llama 4)."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Part(NamedTuple):
    """Names where the outputs of an expert's matrix are in the tensor of all experts."""

    fused: str
    outputs: slice


PARTS = {
    "gate_proj": Part("gate_up_proj", slice(0, None, 2)),
    "up_proj": Part("gate_up_proj", slice(1, None, 2)),
    "down_proj": Part("down_proj", slice(None)),
}
"""By the matrix, where experts have biases (gpt-oss): gates and ups take turns. Without biases ups follow gates."""

_KINDS = {"weight": "", "bias": "_bias", "weight_scale_inv": "_scale_inv"}
"""How the name of a tensor of all experts ends, by the end of an expert's own."""


_GRANITE = ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")
"""End the names of the tensors of all experts in Granite: gates and ups, and downs, [experts, out, in]."""


class OpenFiles(Protocol):
    """Holds the open files of a checkpoint."""

    @property
    def names(self) -> Collection[str]: ...

    @property
    def views(self) -> Sequence[Tensor]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


class SplitExperts:
    """Fulfils :class:`OpenFiles`: ``experts.N.gate_proj.weight``, for example, is a view into ``experts.gate_up_proj``.

    The tensors of all experts are [experts, in, out], and [experts, out] for biases. transformers 5 writes those of
    Qwen3-VL as [experts, out, in].
    """

    def __init__(self, files: OpenFiles, block: int = 1) -> None:
        """``block``: how many outputs share a scale. Raises ``ValueError`` if those of gates and ups share some."""
        self._files, self._block = files, block
        # Beside the expert: its outputs or, of halves, which one of its outputs or of the blocks that share a scale.
        self._split: dict[str, tuple[str, int, slice | int]] = {}
        self._rows_are_outputs: set[str] = set()
        fused = {name for name in files.names if ".experts." in name}
        for stored in [name for name in fused if name.endswith((".gate_up_proj", ".gate_up_proj_bias"))]:
            self._add(stored[: stored.rindex("gate_up_proj")], fused)
        for stored in [name for name in files.names if name.endswith(_GRANITE[0])]:
            self._add_granite(stored.removesuffix(_GRANITE[0]))
        hidden = {name for name, _, _ in self._split.values()}
        self.names: Collection[str] = frozenset(files.names) - hidden | self._split.keys()

    def _add(self, prefix: str, fused: Collection[str]) -> None:
        for matrix, (name, outputs) in self._parts(prefix, fused).items():
            for kind, ending in _KINDS.items():
                stored = f"{prefix}{name}{ending}"
                for expert in range(self._files.shape(stored)[0] if stored in fused else 0):
                    self._split[f"{prefix}{expert}.{matrix}.{kind}"] = (stored, expert, outputs)

    def _add_granite(self, layer: str) -> None:
        """Add the experts of a layer of Granite, whose tensors have names of their own."""
        gate_up, down = (f"{layer}{name}" for name in _GRANITE)
        self._rows_are_outputs.update((gate_up, down))
        matrices: dict[str, tuple[str, slice | int]] = {"gate_proj": (gate_up, 0), "up_proj": (gate_up, 1)}
        matrices["down_proj"] = (down, slice(None))
        for expert in range(self._files.shape(gate_up)[0]):
            for matrix, (stored, outputs) in matrices.items():
                name = f"{layer}block_sparse_moe.experts.{expert}.{matrix}.weight"
                self._split[name] = (stored, expert, outputs)

    def _parts(self, prefix: str, fused: Collection[str]) -> Mapping[str, tuple[str, slice | int]]:
        if f"{prefix}gate_up_proj_bias" in fused:
            return PARTS
        stored = [f"{prefix}{name}" for name in ("gate_up_proj", "down_proj")]
        gate_up, down = (self._files.shape(name) if name in fused else () for name in stored)
        if len(gate_up) != 3 or len(down) != 3:
            return {}  # the model then misses the matrices by name
        rows_are_outputs = gate_up[1] != down[-1]  # both would be the size of the hidden state
        size = gate_up[1 if rows_are_outputs else 2] // 2
        if f"{stored[0]}_scale_inv" in fused and size % self._block:
            raise ValueError(f"{stored[0]}_scale_inv: {self._block} outputs share a scale, which do not divide {size}")
        if rows_are_outputs:
            self._rows_are_outputs.update(f"{name}{ending}" for name in stored for ending in _KINDS.values())
        return {**PARTS, "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}

    @property
    def views(self) -> Sequence[Tensor]:
        return self._files.views

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape) if name in self._split else self._files.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._split:
            return self._files.read(name)
        stored, expert, outputs = self._split[name]
        tensor = self._files.read(stored)[expert]
        if tensor.dim() > 1 and stored not in self._rows_are_outputs:
            tensor = tensor.t()
        if isinstance(outputs, int):
            size = len(tensor) // 2
            outputs = slice(outputs * size, (outputs + 1) * size)
        return tensor[outputs]

    def close(self) -> None:
        self._files.close()
