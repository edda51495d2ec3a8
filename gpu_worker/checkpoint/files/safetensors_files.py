"""Reads the tensors of a safetensors checkpoint from one file or several."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class SafetensorsFiles:
    """Fulfils :class:`.quantization.scheme.TensorFiles` for the files of a checkpoint, which stay mapped."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Open the files. Raises ``ValueError`` naming one that is no safetensors file."""
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._views: dict[Any, Tensor] = {}  # the last tensor that was read from each file
        for path in paths:
            file = self._stack.enter_context(_open(path))
            self._files.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    @property
    def views(self) -> Sequence[Tensor]:
        return list(self._views.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        dtype = str(self._files[name].get_slice(name).get_dtype())
        return _STORED_DTYPES.get(dtype, dtype)

    def read(self, name: str) -> Tensor:
        file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        self._views[file] = tensor
        return tensor

    def close(self) -> None:
        self._views.clear()
        self._stack.close()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
