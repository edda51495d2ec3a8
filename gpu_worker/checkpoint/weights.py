"""Gives models the tensors of a checkpoint, whatever format its files have."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.gguf.gguf_file import gguf_parts, is_gguf
from tokenloom.process.memory import forget_mapped, return_freed

from ..parallel.ranks import ONLY_RANK, Ranks
from ..parallel.sharding import Dimension, length, total
from .directory_source import DirectorySource
from .files.config_reader import weight_files
from .files.quantized_weight import PackedWeight, fill_rows, take_part
from .gguf.source import GgufSource
from .quantization.entries import Scheme, check_kv_scale, kv_scale_names


class Linear(Protocol):
    """Computes x · weightᵀ + bias."""

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map [n, in] to [n, out] of ``dtype``, by default the dtype of x."""


@runtime_checkable
class Unpackable(Protocol):
    """A layer whose weight is an unquantized matrix, however it is packed."""

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]; it must not be changed."""


class LayerPart(NamedTuple):
    """Describes one of the layers that a model computes as one, as adapters see it."""

    name: str
    outputs: int
    stored: str
    """What the checkpoint, and thus an adapter, calls the layer that holds its rows."""
    total: int
    """The rows of that layer, on all ranks."""
    rows: Tensor | None = None
    """[outputs] int64: which of that layer's rows they are; None: all."""
    scale: float | Tensor | None = None
    """What its outputs are multiplied by, as ``Checkpoint.scales`` says; None: nothing."""
    columns: Tensor | None = None
    """[inputs] int64: which of that layer's inputs this rank has; None: all."""
    bias_scale: float | Tensor | None = None
    """What its bias is multiplied by, as :attr:`scale`."""
    adds_bias: bool = True
    """Whether this rank adds the layer's bias: where products are summed, one rank does."""


class ExpertAdapters(Protocol):
    """Changes what experts compute in rows whose requests have adapters."""

    def slots_of(self, prefix: str) -> npt.NDArray[np.int32] | None:
        """Return [T] a number of the adapter of each token in the step, -1 where it has none or one that leaves the
        experts below ``prefix`` as they are; None: no token has another."""

    def wrap(self, prefix: str, layers: Sequence[Linear]) -> list[Linear]:
        """Return the layers of the expert ``prefix``, in the order in which they were loaded, so that adapters change
        them. It lives as long as the result."""

    def take(self, slots: npt.NDArray[np.int32] | None) -> None:
        """Say which adapters the rows have that wrapped layers compute next; None: they have none."""


class LowRankChange(Protocol):
    """Holds what an adapter makes of a matrix [outputs, inputs]: (that + (down · up)ᵀ) times a factor of each row."""

    @property
    def down(self) -> Tensor:
        """Return [inputs, rank]."""

    @property
    def up(self) -> Tensor:
        """Return [rank, outputs]."""

    @property
    def factors(self) -> Tensor | None:
        """Return [outputs] float32; None: 1."""

    @property
    def weight(self) -> Tensor | None:
        """Return what takes the place of the matrix, [outputs, inputs]; None: nothing does."""


class MatrixChanges(Protocol):
    """Holds what adapters change in a matrix that is not the weight of a layer of rows."""

    def groups(self, device: torch.device) -> Iterable[tuple[LowRankChange, Tensor]]:
        """Return the changes that rows of the step have, each with the numbers of its rows, int64 on ``device``."""


class Adapt(Protocol):
    """Lets LoRA adapters change layers."""

    @property
    def experts(self) -> ExpertAdapters: ...

    def __call__(self, base: Linear, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Linear:
        """Wrap a layer that consists of these parts, with these inputs and outputs of this dtype, if their names say
        that adapters may change them."""

    def wrap(self, base: Linear, parts: Sequence[LayerPart], inputs: Dimension, dtype: torch.dtype) -> Linear:
        """Wrap a layer of any name, which computes the rows of a step's tokens."""

    def spread(self, prefix: str, count: int) -> None:
        """Let adapters change all of ``count`` experts below ``prefix``, of which this rank has loaded some."""

    def matrix(self, part: LayerPart, inputs: Dimension, dtype: torch.dtype) -> MatrixChanges:
        """Return what adapters change in a matrix. It lives as long as the result."""


class StoredRows(NamedTuple):
    """Says where the rows of a tensor are among those of a larger one, which the checkpoint holds in its place."""

    name: str
    """The end of the larger tensor's name, without the kind of tensor (``weight``)."""
    rows: Tensor
    """[rows] int64 on the CPU."""
    total: int
    """The rows of the larger tensor."""


_BASE = "model."
"""Begins the names of the tensors below a head."""
FORGET_AT = 64 << 20
"""After how many bytes that were unpacked or cast the files' pages and the allocator's free memory are dropped."""


class WeightSource(Protocol):
    """Holds the open files of a checkpoint, whose tensors have the names of Hugging Face's classes."""

    @property
    def names(self) -> Collection[str]: ...

    @property
    def views(self) -> Sequence[Tensor]:
        """Return a view of each mapped file that was read, until it is closed."""

    @property
    def described_by(self) -> str:
        """Return the file that states the model's configuration, for errors."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        """Return a tensor as it is stored, of ``shape`` if the checkpoint fits its configuration: on the CPU as a view
        of the mapped file, or a weight in few bits."""

    def close(self) -> None: ...


@runtime_checkable
class KVScales(Protocol):
    """A source that may have scales of keys and values, which are no weights; :meth:`WeightSource.read` reads them."""

    kv_scales: Collection[str]


class Checkpoint:
    """Holds an open checkpoint; a context manager.

    Tensors on the CPU that need no cast stay views of the mapped file, so that only pages in use take memory, and
    engines of one model share them. A tensor that is never read belongs to an unsupported feature: :meth:`refuse_rest`
    names it.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
        adapt: Adapt | None = None,
        ranks: Ranks = ONLY_RANK,
        source: WeightSource | None = None,
    ) -> None:
        """``scheme``: how the configuration says that weights are quantized, or None. ``adapt`` wraps the layers that
        are loaded from here, so that LoRA adapters can change them; None: none is wrapped. ``ranks`` each hold a
        part of the layers. ``source`` has the tensors; None: the files of ``path``."""
        self.path = path
        self.adapt = adapt
        self.group = ranks.group
        self.exchange = ranks.experts
        self.balancer = ranks.balancer
        self.dtype = dtype
        self.device = device
        self._source = source or open_files(path, scheme)
        names = self._source.names
        # Base classes, such as Qwen3Model, save their tensors without the name that a class with a head gives them.
        self._is_headless = f"{_BASE}embed_tokens.weight" not in names and "embed_tokens.weight" in names
        self.rounded: list[tuple[str, int, int]] = []
        """The layers for which a quantization was asked at load: name, outputs, inputs."""
        self.stored_names: Sequence[tuple[str, str]] = ()
        """What the files call parts of tensors' names, after them."""
        self.stored_rows: Mapping[str, StoredRows] = {}
        """By the last two parts of a module's name: tensors that are rows of others."""
        self.scales: Mapping[str, float | Tensor] = {}
        """By the last three parts of a tensor's name: what it, or each of its rows, is multiplied by."""
        self.host_room = 0
        """How many bytes of weights may still stay in the host's memory, where a GPU reads them."""
        self._taken: set[str] = set()
        self._copied = 0  # bytes of the files since memory was dropped last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._forget_mapped()  # loading has read the whole file, but only a few embedding rows stay in use
        self._source.close()

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._source.names

    def take(self, name: str, *shape: Dimension, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor ``name`` in ``dtype``, by default the model's; of dimensions that are cut only this rank's
        part is read.

        Raises ``ValueError`` if it is absent or the whole tensor has another shape.
        """
        if (scale := self._scale_of(name)) is not None and self.device.type != "meta":
            tensor = self._take(name, shape, dtype)
            if isinstance(scale, Tensor):
                scale = take_part(scale, shape[:1]).to(self.device).view(-1, *[1] * (len(shape) - 1))
            return (tensor.float() * scale).to(tensor.dtype)
        if (part := self._rows_of(name)) is None:
            return self._take(name, shape, dtype)
        layer, _, _, kind = name.rsplit(".", 3)
        whole = self._take(f"{layer}.{part.name}.{kind}", (part.total, *shape[1:]), dtype)
        return whole[take_part(part.rows, shape[:1]).to(whole.device)]

    def _take(self, name: str, shape: tuple[Dimension, ...], dtype: torch.dtype | None) -> Tensor:
        stored = self._read(name, tuple(map(total, shape)))
        if isinstance(stored, Tensor):
            part = take_part(stored, shape)
            # Some rows of a mapped file are a view of it; of a tensor that was made, they would keep the whole one.
            is_view = part.numel() < stored.numel() and not self._source.views
            stored = part.clone() if is_view else part
            tensor = stored.to(self.device, dtype or self.dtype)
            if tensor is not stored:
                self._count_copied(stored.nbytes)
            return tensor
        if self.device.type == "meta":
            return torch.empty(tuple(map(length, shape)), dtype=dtype or self.dtype, device="meta")
        rows = fill_rows(stored, dtype or self.dtype, self.device, shape[0])
        tensor = take_part(rows, (len(rows), *shape[1:]))
        self._count_copied(stored.shape[0] * stored.shape[1] * stored.bits // 8)
        return tensor

    def take_integers(self, name: str, count: int) -> Tensor:
        """Return the tensor ``name`` of integers, [count] int64 on the CPU. Raises ``ValueError`` as :meth:`take`."""
        if name not in self._source.names:
            raise ValueError(f"the checkpoint has no tensor {name}, which its {self._source.described_by} asks for")
        stored = self._source.read(name, (count,))
        if not isinstance(stored, Tensor) or stored.is_floating_point() or tuple(stored.shape) != (count,):
            raise ValueError(f"{name} must hold {count} integers, as {self._source.described_by} asks")
        self._taken.add(name)
        return stored.to(torch.int64)

    def take_packed(self, name: str, outputs: int, inputs: int) -> PackedWeight | None:
        """Return the weight ``name`` [outputs, inputs] as it is packed; None if it is stored as a plain tensor, or must
        not be read because the device holds no content, or is rows of another one, or is scaled. Raises ``ValueError``
        as :meth:`take`."""
        if self._rows_of(name) is not None or self._scale_of(name) is not None:
            return None
        stored = self._read(name, (outputs, inputs))
        if isinstance(stored, Tensor) or self.device.type == "meta":
            return None
        self._count_copied(outputs * inputs * stored.bits // 8)
        return stored

    @property
    def has_kv_scales(self) -> bool:
        """Whether the files state by what keys and values are divided in a cache of 8-bit floats."""
        return isinstance(self._source, KVScales) and bool(self._source.kv_scales)

    def kv_scale(self, prefix: str, kind: str) -> float:
        """Return by what the keys (``kind`` k) or values (v) of the attention ``prefix`` are divided in a cache of
        8-bit floats; 1: the files do not say. Raises ``ValueError`` for anything but one positive number."""
        known: Collection[str] = self._source.kv_scales if isinstance(self._source, KVScales) else ()
        names = (self._stored(f"{prefix}.{each}") for each in kv_scale_names(kind))
        found = next((name for name in names if name in known), None)
        if found is None or self.device.type == "meta":
            return 1.0
        stored = self._source.read(found, ())
        scale = float(stored) if isinstance(stored, Tensor) and stored.numel() == 1 else math.nan
        check_kv_scale(found, scale)
        return scale

    def part(self, name: str, outputs: Dimension, inputs: Dimension) -> LayerPart:
        """Return what adapters see of the layer ``name``, of these outputs and inputs."""
        rows, count, columns = self._rows_of(f"{name}.weight"), length(outputs), indices(inputs)
        adds_bias = columns is None or self.group.rank == 0
        if rows is not None:
            stored, own = f"{name.rsplit('.', 2)[0]}.{rows.name}", take_part(rows.rows, (outputs,))
            return LayerPart(name, count, stored, rows.total, own, columns=columns, adds_bias=adds_bias)
        scale, bias_scale = (
            take_part(each, (outputs,)) if isinstance(each, Tensor) else each
            for each in (self._scale_of(f"{name}.weight"), self._scale_of(f"{name}.bias"))
        )
        stored, of_all = self._renamed(name), total(outputs)
        return LayerPart(name, count, stored, of_all, indices(outputs), scale, columns, bias_scale, adds_bias)

    def drop_read(self) -> None:
        """Drop the pages of the files that were read, and freed copies. Pages that are still in use are read again."""
        self._forget_mapped()
        return_freed()
        self._copied = 0

    def skip(self, names: Iterable[str]) -> None:
        """Accept tensors that may be present and are not needed."""
        self._taken.update(map(self._stored, names))

    def skip_below(self, prefix: str) -> None:
        """Accept all tensors whose names begin with ``prefix``, which are not needed."""
        self._taken.update(name for name in self._source.names if name.startswith(prefix))

    def refuse_rest(self) -> None:
        """Raise ``ValueError`` naming tensors that the model did not read."""
        rest = sorted(set(self._source.names) - self._taken)
        if rest:
            more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
            raise ValueError(f"the checkpoint holds tensors of an unsupported feature: {', '.join(rest[:3])}{more}")

    def _forget_mapped(self) -> None:
        forget_mapped([view.data_ptr() for view in self._source.views])

    def _count_copied(self, nbytes: int) -> None:
        """Now and then drop what was read of the files, and freed copies, so that they do not add up to a model."""
        # Without it loading takes the files, the freed copies and the result at once. With it a load takes the result
        # and about one layer.
        self._copied += nbytes
        if self._copied > FORGET_AT:
            self.drop_read()

    def _rows_of(self, name: str) -> StoredRows | None:
        if not self.stored_rows:
            return None
        layer, *parts, kind = name.rsplit(".", 3)
        found = self.stored_rows.get(".".join(parts))
        # GGUF files hold parts of a matrix as tensors of their own.
        return found if found is not None and f"{layer}.{found.name}.{kind}" in self else None

    def _scale_of(self, name: str) -> float | Tensor | None:
        return self.scales.get(".".join(name.split(".")[-3:])) if self.scales else None

    def _stored(self, name: str) -> str:
        name = self._renamed(name)
        return name.removeprefix(_BASE) if self._is_headless else name

    def _renamed(self, name: str) -> str:
        for plain, stored in self.stored_names:
            name = name.replace(plain, stored)
        return name

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        name = self._stored(name)
        if name not in self._source.names:
            raise ValueError(f"the checkpoint has no tensor {name}, which its {self._source.described_by} asks for")
        stored = self._source.read(name, shape)
        if tuple(stored.shape) != shape:
            wanted = f"{self._source.described_by} asks for {list(shape)}"
            raise ValueError(f"{name} has shape {list(stored.shape)}, {wanted}")
        if isinstance(stored, Tensor) and (not stored.dtype.is_floating_point or stored.dtype.itemsize < 2):
            raise ValueError(f"{name} is stored as {stored.dtype} without a scale: the checkpoint lacks a tensor")
        self._taken.add(name)
        return stored


class RenamedSource:
    """Gives the tensors of another source the names of a built-in class."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        """``names``: what stands in the place of each part of a name, one after the other. Raises ``ValueError`` if two
        tensors get one name."""
        self._source = source
        self._stored: dict[str, str] = {}
        scales: Collection[str] = source.kv_scales if isinstance(source, KVScales) else ()
        for stored in (*source.names, *scales):
            plain = built_in_name(stored, names)
            if (other := self._stored.setdefault(plain, stored)) != stored:
                raise ValueError(f"a plugin gives the tensors {other} and {stored} one name, {plain}")
        self.kv_scales = frozenset(built_in_name(stored, names) for stored in scales)
        self.names: Collection[str] = self._stored.keys() - self.kv_scales  # read again for each tensor

    @property
    def views(self) -> Sequence[Tensor]:
        return self._source.views

    @property
    def described_by(self) -> str:
        return self._source.described_by

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | PackedWeight:
        return self._source.read(self._stored[name], shape)

    def close(self) -> None:
        self._source.close()


def built_in_name(stored: str, names: Mapping[str, str]) -> str:
    """Return what a built-in class calls a tensor. ``names`` as in :class:`RenamedSource`."""
    for part, built_in in names.items():
        stored = stored.replace(part, built_in)
    return stored


def indices(dimension: Dimension) -> Tensor | None:
    """Return which entries of a dimension this rank has; None: all."""
    return None if isinstance(dimension, int) else take_part(torch.arange(total(dimension)), (dimension,))


def open_files(path: Path, scheme: Scheme | None) -> WeightSource:
    """Return what has the tensors of a checkpoint's files, in the formats that are built in."""
    return GgufSource(path) if is_gguf(path) else DirectorySource(path, scheme)


FileStamps = tuple[tuple[str, int, int, int], ...]


def file_stamps(path: Path, load_format: str = "auto") -> FileStamps:
    """Return (name, size, time of change, inode) of a checkpoint's configuration and weight files, or, of a format that
    a plugin reads, of all its files. Equal results mean equal weights; the cache of fingerprints relies on it. Raises
    ``ValueError`` if a file is missing."""
    weights = weight_files(path) if load_format == "auto" and not is_gguf(path) else []
    files = gguf_parts(path) if is_gguf(path) else (path / "config.json", *weights)
    if ":" in load_format:
        files = tuple(sorted(file for file in path.iterdir() if file.is_file()))
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def check_unchanged(path: Path, stamps: FileStamps | None, load_format: str = "auto") -> None:
    """Raise ``ValueError`` if the checkpoint ``path`` may not be loaded again: its files have no longer the ``stamps``
    that they had when they were loaded, or ``stamps`` is None because the weights were dropped for good."""
    if stamps is None:
        raise ValueError("the weights were dropped for good; call reload_weights")
    if file_stamps(path, load_format) != stamps:
        raise ValueError("the checkpoint's files changed after they were loaded; call reload_weights to use them")
