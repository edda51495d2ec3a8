"""Sends small messages and large scattered bytes on a blocking stream socket, plain or TLS.

Every function raises ``OSError``, including ``TimeoutError``, if the peer is gone, stuck or sends invalid data.
"""

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from tokenloom.engine_core.kv_transfer.kv_transport import IntArray, KVPool, KVRegion, divided
from tokenloom.engine_core.wire.frames import Pieces

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 4 << 20
"""Room for a list of a million blocks; a longer message is invalid."""

Message = TypeVar("Message", bound=msgspec.Struct)


def send_frame(sock: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(sock: socket.socket, kind: type[Message]) -> Message:
    """Receive one message. Raises ``msgspec.DecodeError`` too, as :func:`decoded`."""
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if length > _MAX_FRAME_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return decoded(_receive(sock, length), kind)


def decoded(data: bytes | bytearray, kind: type[Message]) -> Message:
    """Return the message that a peer encoded. Raises ``msgspec.DecodeError`` for anything else, broken text and lists
    nested too deeply included, for which msgspec has other errors."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def pieces(pool: KVPool, ids: IntArray) -> list[memoryview]:
    """Return a pool's memory under these blocks, region by region, and behind them under the slots; adjacent ones form
    one piece."""
    blocks, slots = divided(ids, pool.num_blocks)
    memory = pool.host.buffer
    found = _pieces(memory, pool.regions_of(is_state=False), blocks)
    return found + _pieces(memory, pool.regions_of(is_state=True), slots) if len(slots) else found


def _pieces(memory: memoryview, regions: Sequence[KVRegion], block_ids: IntArray) -> list[memoryview]:
    if not len(block_ids):
        return []
    begins = np.concatenate(([0], np.flatnonzero(np.diff(block_ids) != 1) + 1))
    counts = np.diff(np.concatenate((begins, [len(block_ids)]))).tolist()
    runs = list(zip(block_ids[begins].tolist(), counts, strict=True))
    found = []
    for region in regions:
        for block_id, count in runs:
            begin = region.offset + block_id * region.block_bytes
            found.append(memory[begin : begin + count * region.block_bytes])
    return found


def send(sock: socket.socket, data: Sequence[memoryview]) -> None:
    """Send all pieces; the kernel gathers them, except under TLS."""
    if isinstance(sock, ssl.SSLSocket):
        for piece in data:
            sock.sendall(piece)
        return
    rest = Pieces(data)
    while head := rest.head():
        rest.advance(sock.sendmsg(head))


def receive_into(sock: socket.socket, data: Sequence[memoryview]) -> None:
    """Fill all pieces; the kernel scatters them, except under TLS."""
    rest = Pieces(data)
    tls = isinstance(sock, ssl.SSLSocket)
    while head := rest.head():
        count = sock.recv_into(head[0]) if tls else sock.recvmsg_into(head)[0]
        if not count:
            raise ConnectionError("the peer hung up")
        rest.advance(count)


def _receive(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    receive_into(sock, [memoryview(data)] if length else [])
    return data
