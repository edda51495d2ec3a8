"""Joins and encodes which experts computed the tokens of a request: rows in the order of prompt and output.

A row has a number for each expert, of one byte or two (little-endian), in the order of layers that have experts. The
engine core imports this module: it imports neither messages nor numpy.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokenloom.v1 import types_pb2


class RoutedPart(Protocol):
    """Describes the rows of consecutive tokens: a message of the core or of a proto."""

    @property
    def start(self) -> int:
        """Return the position of the first token, counted over prompt and output."""

    @property
    def num_layers(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    @property
    def id_bytes(self) -> int:
        """Return the bytes of an expert's number, 1 or 2."""

    @property
    def expert_ids(self) -> bytes:
        """Return [n, num_layers, top_k] numbers."""


class RoutedRows:
    """Holds the rows from ``start`` up to ``end``, and joins more to them."""

    def __init__(self, start: int = 0) -> None:
        """``start``: the position of the first row that is wanted."""
        self.start = self.end = start
        self.num_layers = self.top_k = 0
        self.id_bytes = 1
        self._parts: list[bytes] = []

    @property
    def expert_ids(self) -> bytes:
        """Return all rows, [end - start, num_layers, top_k]."""
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def add(self, part: RoutedPart, end: int | None = None) -> None:
        """Join the rows of ``part`` that are not here yet, up to position ``end``; None: all.

        Rows that do not adjoin those here replace them, so that there is never a gap.
        """
        size = part.num_layers * part.top_k * part.id_bytes
        last = part.start + len(part.expert_ids) // size
        last = last if end is None else min(last, end)
        if last <= self.end:
            return
        if part.start > self.end:
            self.start = self.end = part.start
            self._parts = []
        self.num_layers, self.top_k, self.id_bytes = part.num_layers, part.top_k, part.id_bytes
        first = self.end - part.start
        self._parts.append(part.expert_ids[first * size : (last - part.start) * size])
        self.end = last

    def cut(self, end: int) -> None:
        """Drop the rows from position ``end`` on."""
        if end < self.end:
            size = self.num_layers * self.top_k * self.id_bytes
            self._parts = [self.expert_ids[: max(end - self.start, 0) * size]]
            self.end = max(end, self.start)

    def drop(self) -> None:
        """Forget the rows, which were sent; the next ones follow them."""
        self.start = self.end
        self._parts = []


def routed_message(part: RoutedPart) -> "types_pb2.RoutedExperts":
    """Return the rows as a message."""
    from tokenloom.v1 import types_pb2  # here, because the engine core imports no messages

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
