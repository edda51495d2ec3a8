"""Keeps the weights of a model in host memory while a GPU needs its own for other work."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .model import LanguageModel

_PACKAGE = __name__.split(".gpu_worker.", maxsplit=1)[0] + ".gpu_worker."


class OnHost:
    """Holds a model whose tensors were moved to host memory."""

    def __init__(self, model: LanguageModel) -> None:
        """Move every tensor of ``model`` to host memory; the model cannot compute until :meth:`restore`.

        Attributes:
            nbytes: Bytes of the tensors.
        """
        self._model = model
        self._moved = [(tensor, tensor.device) for tensor in tensors_of(model)]
        self.nbytes = sum(tensor.nbytes for tensor, _ in self._moved)
        for tensor, _ in self._moved:
            # Copying is quicker than reading a large checkpoint again, at the price of as much host memory. On a CPU
            # there is nothing to move: both levels of sleep drop the weights, and differ in which files may be loaded
            # again.
            tensor.data = torch.empty_like(tensor, device="cpu").copy_(tensor)

    def restore(self) -> LanguageModel:
        """Move the tensors back to where they were, and return the model."""
        for tensor, device in self._moved:
            tensor.data = tensor.to(device)
        return self._model


def tensors_of(model: LanguageModel) -> list[Tensor]:
    """Return every tensor that the parts of a model hold, each once, but none that oneDNN packed: it is on the host."""
    found = _walk(model, set())
    return list({id(tensor): tensor for tensor in found if not tensor.is_mkldnn and not tensor.is_meta}.values())


def _walk(part: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
        return
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, (list, tuple)):
        children: list[object] = list(part)
    elif isinstance(part, dict):
        children = list(part.values())
    elif isinstance(part, nn.Module) or (type(part).__module__.startswith(_PACKAGE) and hasattr(part, "__dict__")):
        children = list(vars(part).values())
    else:
        children = []
    for child in children:
        yield from _walk(child, seen)
