"""Encodes which experts computed the tokens of a request, for messages and clients."""

from typing import TYPE_CHECKING

from tokenloom.v1 import types_pb2

from .routed_rows import RoutedPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def routed_message(part: RoutedPart) -> types_pb2.RoutedExperts:
    """Return the rows as a message."""
    return types_pb2.RoutedExperts(
        start=part.start,
        num_layers=part.num_layers,
        top_k=part.top_k,
        id_bytes=part.id_bytes,
        expert_ids=part.expert_ids,
    )


def to_array(part: RoutedPart) -> "npt.NDArray[np.unsignedinteger]":
    """Return the rows as [n, num_layers, top_k] uint8 or uint16."""
    import numpy as np  # imported here: it would cost the start of every service 0.1 s

    numbers = np.frombuffer(part.expert_ids, dtype="<u2" if part.id_bytes == 2 else "u1")
    return numbers.reshape(-1, part.num_layers, part.top_k)


def to_npy(part: RoutedPart) -> bytes:
    """Return the array of :func:`to_array` as a ``.npy`` file of version 1.0."""
    shape = (len(part.expert_ids) // (part.num_layers * part.top_k * part.id_bytes), part.num_layers, part.top_k)
    kind = "<u2" if part.id_bytes == 2 else "|u1"
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + part.expert_ids
