"""Reads the tensors of a safetensors checkpoint from one file or several."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..platform.memory import forget_mapped, return_freed

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class Checkpoint:
    """Holds an open checkpoint; a context manager.

    Tensors on the CPU that need no cast stay views of the mapped file, so that only pages in use take memory, and
    engines of one model share them. A tensor that is never read belongs to an unsupported feature: :meth:`refuse_rest`
    names it.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.directory = directory
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._paths = weight_files(directory)
        for path in self._paths:
            file = self._stack.enter_context(_open(path))
            self._files.update(dict.fromkeys(file.keys(), file))
        self._taken: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()
        forget_mapped(self._paths)  # loading has read the whole file, but only a few embedding rows stay in use

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int) -> Tensor:
        """Return the tensor ``name`` in the model's dtype. Raises ``ValueError`` if absent or of another shape."""
        if name not in self._files:
            raise ValueError(f"the checkpoint has no tensor {name}, which its config.json asks for")
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
        self._taken.add(name)
        return tensor.to(self._device, self._dtype)

    def return_dropped(self) -> None:
        """Return the memory of dropped tensors to the system, such as copies that were made while packing.

        The allocator would otherwise keep it in pieces that the next tensors do not fit into.
        """
        return_freed()

    def skip(self, names: Iterable[str]) -> None:
        """Accept tensors that may be present and are not needed."""
        self._taken.update(names)

    def refuse_rest(self) -> None:
        """Raise ``ValueError`` naming tensors that the model did not read."""
        rest = sorted(self._files.keys() - self._taken)
        if rest:
            more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
            raise ValueError(f"the checkpoint holds tensors of an unsupported feature: {', '.join(rest[:3])}{more}")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises ``ValueError`` if there are none or one is missing."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise ValueError(f"{directory} has neither {_SINGLE} nor {_INDEX}: only safetensors weights are supported")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} must be a JSON object with a weight_map") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"{index} names the file {name!r}, which is not in the directory")
    return [directory / name for name in names]


FileStamps = tuple[tuple[str, int, int, int], ...]


def file_stamps(directory: Path) -> FileStamps:
    """Return (name, size, time of change, inode) of a checkpoint's configuration and weight files. Equal results mean
    equal weights; the cache of fingerprints relies on it. Raises ``ValueError`` if a file is missing."""
    stats = [(path.name, path.stat()) for path in (directory / "config.json", *weight_files(directory))]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def stored_dtype(directory: Path) -> str:
    """Return the name of the first tensor's dtype, for a configuration that declares none."""
    with _open(weight_files(directory)[0]) as file:
        stored = str(file.get_slice(min(file.keys())).get_dtype())
    return _STORED_DTYPES.get(stored, stored)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
