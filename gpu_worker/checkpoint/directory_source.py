"""Reads the weights of a checkpoint directory, whichever format its files have: one file or several, of safetensors or
of PyTorch; or makes random ones in their place, because what a model costs depends on its shapes alone."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files.config_reader import is_pickled, read_wrapper, weight_files
from .files.fused_experts import OpenFiles, SplitExperts
from .files.quantized_weight import PackedWeight
from .files.text_part import text_tensor
from .quantization.compressed_tensors import find_compressed
from .quantization.entries import Awq, CompressedTensors, Fp8, Gptq, Mxfp4, Scheme
from .quantization.grouped_integers import find_awq, find_gptq
from .quantization.scheme import Found, TensorFiles, is_kv_scale
from .quantization.small_floats import find_fp8, find_mxfp4


class SafetensorsFiles:
    """Fulfils :class:`.quantization.scheme.TensorFiles` for the files of a checkpoint, which stay mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files. Raises ``ValueError`` naming one that is no safetensors file."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._views: dict[Any, Tensor] = {}  # the last tensor that was read from each file
        for path in paths:
            file = self._stack.enter_context(_open_safetensors(path))
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    @property
    def views(self) -> Sequence[Tensor]:
        return list(self._views.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        self._views[file] = tensor
        return tensor

    def close(self) -> None:
        self._views.clear()
        self._stack.close()


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None


class PytorchFiles:
    """Fulfils :class:`.quantization.scheme.TensorFiles` for the files of a checkpoint, which stay mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read where the tensors are. Raises ``ValueError`` for a file that holds other objects than tensors."""
        self._tensors: dict[str, Tensor] = {}
        self.views: list[Tensor] = []
        for path in paths:
            tensors = _read_tensors(path)
            self._tensors.update(tensors)
            self.views += list(tensors.values())[:1]

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def close(self) -> None:
        self._tensors = {}
        self.views = []


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Map the file. Only tensors and plain values pass ``weights_only``, so that no code of the file runs."""
    try:
        # facebook/opt-125m and other early models have no other file on the hub. mmap needs the format of PyTorch 1.6
        # and later; older files cannot be mapped and are refused.
        values: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a broken file raises errors of many kinds
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as tensors alone ({reason}): convert it to safetensors with save_pretrained of "
            "transformers"
        ) from None
    if not isinstance(values, dict) or not all(isinstance(tensor, Tensor) for tensor in values.values()):
        raise ValueError(f"{path} must hold a dictionary of tensors: convert the checkpoint to safetensors")
    return values


class TextFiles:
    """Fulfils :class:`.files.fused_experts.OpenFiles` with the tensors of the text model alone, by the names that they
    have in a checkpoint of their own."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._stored = {name: stored for stored in files.names if (name := text_tensor(stored)) is not None}

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    @property
    def views(self) -> Sequence[Tensor]:
        return self._files.views

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._stored[name])

    def read(self, name: str) -> Tensor:
        return self._files.read(self._stored[name])

    def close(self) -> None:
        self._files.close()


_FIND: dict[type[Scheme], Callable[[Any, TensorFiles], Mapping[str, Found]]] = {
    Gptq: find_gptq,
    Awq: find_awq,
    CompressedTensors: find_compressed,
    Fp8: find_fp8,
    Mxfp4: find_mxfp4,
}
"""By the entries of a method: what finds its weights."""


class DirectorySource:
    """Fulfils :class:`.weights.WeightSource`; ``scheme`` joins the parts of quantized weights."""

    described_by = "config.json"

    def __init__(self, directory: Path, scheme: Scheme | None, *, splits_experts: bool = True) -> None:
        """``splits_experts``: give each expert tensors of its own; transformers' modules read those of all experts."""
        files: OpenFiles = _open(weight_files(directory))
        if read_wrapper(directory) is not None:
            files = TextFiles(files)
        block = scheme.block if isinstance(scheme, Fp8) else None
        self._files = SplitExperts(files, block[0] if block else 1) if splits_experts else files
        self._found: Mapping[str, Found] = _FIND[type(scheme)](scheme, self._files) if scheme else {}
        parts = {part for found in self._found.values() for part in found.parts}
        self.kv_scales = frozenset(name for name in self._files.names if is_kv_scale(name)) if scheme else frozenset()
        """The names of scales of a cache of 8-bit floats, which are no weights."""
        parts |= self.kv_scales
        self.names = frozenset(self._files.names).difference(parts) | self._found.keys()

    @property
    def views(self) -> Sequence[Tensor]:
        return self._files.views

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        return self._found[name].weight if name in self._found else self._files.read(name)

    def close(self) -> None:
        self._files.close()


def read_all(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a small directory, such as those of one layer."""
    files = _open(weight_files(directory))
    try:
        return {name: files.read(name).clone() for name in files.names}
    finally:
        files.close()


def _open(paths: Collection[Path]) -> OpenFiles:
    paths = list(paths)
    return PytorchFiles(paths) if is_pickled(paths[0]) else SafetensorsFiles(paths)


_SEED = 1234
_STD = 0.02
_OUTPUT = "lm_head.weight"


class _AnyName(Collection[str]):
    """Contains every name but the given ones."""

    def __init__(self, *absent: str) -> None:
        self._absent = absent

    def __contains__(self, name: object) -> bool:
        return name not in self._absent

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class DummySource:
    """Fulfils :class:`.weights.WeightSource` without a file. Matrices are normal with a small deviation, biases 0, and
    other vectors, such as those of norms, 1.

    A tensor follows from its name, shape and dtype and the kind of device, so engines of a mesh have the same weights.
    """

    described_by = "config.json"
    views: Sequence[Tensor] = ()

    def __init__(self, dtype: torch.dtype, device: torch.device, *, has_output: bool = True) -> None:
        """``has_output``: whether the output matrix is one of its own, and not that of the embeddings."""
        self.names: Collection[str] = _AnyName() if has_output else _AnyName(_OUTPUT)
        self._dtype = dtype
        self._device = device

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._device.type == "meta":
            return tensor
        if len(shape) == 1:
            return tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        # By name and not in order, so that all ranks and engines have the same weights whatever they load first, and KV
        # can move between them.
        generator = torch.Generator(self._device).manual_seed(_SEED + zlib.crc32(name.encode()))
        return tensor.normal_(0.0, _STD, generator=generator)

    def close(self) -> None:
        pass
