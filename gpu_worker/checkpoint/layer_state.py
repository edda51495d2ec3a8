"""What sets a linear layer apart from others of the same shape, as it is packed: layers take it over from each other,
also from those of other processes, to which it is sent as bytes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from .weights import Linear


class LayerState(NamedTuple):
    """Holds the weights of one layer."""

    tensors: list[Tensor]
    numbers: list[float]


@runtime_checkable
class Movable(Protocol):
    """A layer that can take over the weights of another one of the same shape."""

    def state(self) -> LayerState:
        """Return what :meth:`with_state` needs; it must not be changed."""

    def with_state(self, state: LayerState) -> Linear:
        """Return a layer of the same shape with another state. Raises ``ValueError`` for a state of another shape."""

    def take(self, other: Linear) -> Linear:
        """Return ``other``, which nothing else uses, or this layer with its weights: memory is freed in huge pages,
        each with the last matrix that lies in it."""


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return those that are not None."""
    return [each for each in tensors if each is not None]


def shapes_of(tensors: Iterable[Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return what :func:`check_state` compares."""
    return [(each.dtype, tuple(each.shape)) for each in tensors]


def check_state(state: LayerState, shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]], num_numbers: int) -> None:
    """Raise ``ValueError`` unless a state, which may come from another process, has these tensors."""
    # Kernels read as many bytes as the layer's shape says.
    if (found := shapes_of(state.tensors)) != list(shapes) or len(state.numbers) != num_numbers:
        raise ValueError(f"weights of {found} do not fit a layer of {list(shapes)}")


def copy_state(own: LayerState, new: LayerState) -> None:
    """Copy the tensors of a state of the same shapes to where a layer has its own."""
    with torch.inference_mode():  # either may have been made in a step
        for target, source in zip(own.tensors, new.tensors, strict=True):
            target.copy_(source)


class _Head(msgspec.Struct, array_like=True):
    """Precedes the tensors of several states: of each its numbers, and the dtype and shape of each tensor."""

    layers: list[tuple[list[float], list[tuple[str, list[int]]]]]


_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8)}
_ALIGNED = 64
_SIZE_BYTES = 8
_heads = msgspec.msgpack.Decoder(_Head)


def _head_of(states: Sequence[LayerState]) -> bytes:
    head = _Head([(numbers, [(str(each.dtype), list(each.shape)) for each in tensors]) for tensors, numbers in states])
    encoded = msgspec.msgpack.encode(head)
    sized = len(encoded).to_bytes(_SIZE_BYTES, "little") + encoded
    return sized + bytes(-len(sized) % _ALIGNED)


def packed_bytes(states: Sequence[LayerState]) -> int:
    """Return how many bytes :func:`pack_states` makes of states."""
    sizes = [each.nbytes for tensors, _ in states for each in tensors]
    return len(_head_of(states)) + sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


def pack_states(states: Sequence[LayerState]) -> Tensor:
    """Return states as bytes of the host, uint8 [n]."""
    packed = [torch.frombuffer(bytearray(_head_of(states)), dtype=torch.uint8)]
    for tensors, _ in states:
        for each in tensors:
            data = each.detach().contiguous().view(torch.uint8).flatten().cpu()
            packed += [data, torch.zeros(-len(data) % _ALIGNED, dtype=torch.uint8)]
    return torch.cat(packed)


def unpack_states(data: Tensor) -> list[LayerState]:
    """Return the states in bytes that :func:`pack_states` made, and zeros may follow; the tensors are views. Raises
    ``ValueError`` for bytes that hold none."""
    size = int.from_bytes(bytes(data[:_SIZE_BYTES].tolist()), "little")
    if size > len(data) - _SIZE_BYTES:
        raise ValueError(f"{len(data)} bytes of weights begin with a head of {size}")
    try:
        head = _heads.decode(bytes(data[_SIZE_BYTES : _SIZE_BYTES + size].numpy()))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"bytes that hold no weights: {error}") from None
    place, states = -(-(_SIZE_BYTES + size) // _ALIGNED) * _ALIGNED, []
    for numbers, described in head.layers:
        tensors = []
        for name, shape in described:
            dtype = _DTYPES.get(name)
            count = torch.Size(shape).numel() if all(0 <= each < 1 << 40 for each in shape) else -1
            if dtype is None or count < 0 or place + count * dtype.itemsize > len(data):
                raise ValueError(f"{len(data)} bytes of weights are to hold {name} {shape}")
            end = place + count * dtype.itemsize
            tensors.append(data[place:end].view(dtype).view(shape))
            place = -(-end // _ALIGNED) * _ALIGNED
        states.append(LayerState(tensors, numbers))
    return states
