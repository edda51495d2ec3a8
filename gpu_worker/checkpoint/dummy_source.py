"""Makes random weights in the place of a checkpoint's: what a model costs depends on its shapes alone."""

import zlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

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
