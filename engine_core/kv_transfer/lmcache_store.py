"""A store of KV blocks over the network: the server of LMCache.

Its protocol is spoken here over a plain socket, so that an engine needs no library of LMCache. An answer that is late
or not understood ends the connection; the next call makes another one.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from .block_store import Buffer, StoreError

_FIND_AHEAD = 64
"""Searches sent before their answers are read, which then fill no buffer of a socket."""
_READ_AHEAD = 4
"""Blocks asked for before the first of them is read, so that the network does not wait between two of them."""
_MOST_REMOVED = 1 << 12
MOST_VALUE_BYTES = (1 << 31) - 1
"""What the size of a value can say in this protocol."""


class HungUpError(StoreError):
    """Raised when the server has ended the connection, or accepts none."""


class Connection:
    """Holds a connection to a server, made when it is needed, over which each answer may take a number of seconds."""

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._address = host, port
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._deadline = 0.0

    def expect(self, *, more: bool = False) -> None:
        """Give the next answer its time. Unless there are ``more`` answers on their way, connect if there is no
        connection that works."""
        self._deadline = time.monotonic() + self._timeout
        if more:
            return
        if self._socket is not None and _is_stale(self._socket):
            self.close()
        if self._socket is None:
            with self._translated():
                self._socket = socket.create_connection(self._address, self._timeout)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts: Buffer) -> None:
        """Send bytes. Raises :class:`StoreError`, as what follows."""
        with self._translated():
            for part in parts:
                self._open().sendall(part)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._socket is not None

    def receive(self, nbytes: int) -> bytearray:
        """Return the next bytes of an answer."""
        found, have = bytearray(nbytes), 0
        view = memoryview(found)
        with self._translated():
            while have < nbytes:
                if not (count := self._open().recv_into(view[have:])):
                    raise ConnectionResetError("the server hung up")
                have += count
        return found

    def has_ended(self) -> bool:
        """Wait for what the server sends next. Returns True, and closes the connection, if it ended that instead."""
        with self._translated():
            has_ended = not self._open().recv(1, socket.MSG_PEEK)
        if has_ended:
            self.close()
        return has_ended

    def fail(self, what: str) -> StoreError:
        """End the connection, and return the error for an answer that is not understood."""
        self.close()
        return StoreError(f"{self._address[0]}:{self._address[1]}: {what}")

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionResetError("the connection is closed")
        # The whole answer has the time, however many pieces it comes in.
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        self._socket.settimeout(left)
        return self._socket

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            self.close()
            raise HungUpError(f"{self._address[0]}:{self._address[1]}: {error}") from error
        except (OSError, ValueError) as error:
            raise self.fail(str(error) or type(error).__name__) from error


def _is_stale(connection: socket.socket) -> bool:
    """Return whether an idle connection has ended, as when its server was started anew, or brings an unasked answer."""
    connection.settimeout(0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


_ASK = struct.Struct("<9i150s")
"""Command, size, format, dtype, place, four numbers of a shape, and the key."""
_ANSWER = struct.Struct("<9i")
"""Code, size, format, dtype, four numbers of a shape, and a place."""
_PUT, _GET, _EXIST = 1, 2, 3
_SUCCESS, _FAIL = 200, 400
_BYTES = 4
"""The format of plain bytes."""


class LMCacheStore:
    """Keeps blocks on a server of LMCache (``python -m lmcache.v1.server``), as plain bytes under names of ours.

    That server never evicts what it has, so what was found stays; it has no access control, and belongs on a network of
    the engines alone. It cannot remove a value either: an empty one replaces a wrong one. Of an engine that ends within
    a put it keeps a name and a size without a value, and hangs up on all who ask for that.
    """

    label = "lmcache"

    def __init__(self, host: str, port: int, timeout: float) -> None:
        """``timeout``: seconds for each answer."""
        self._link = Connection(host, port, timeout)
        self._removed = set[bytes]()
        """Keys whose values are wrong, and are to be replaced."""

    def find(self, keys: Sequence[bytes], *, in_order: bool) -> set[bytes]:
        found = set[bytes]()
        for begin in range(0, len(keys), _FIND_AHEAD):
            part = keys[begin : begin + _FIND_AHEAD]
            self._link.expect()
            self._link.send(b"".join(_asked(_EXIST, key) for key in part))
            are_there = [self._answer()[0] == _SUCCESS for _ in part]
            found.update(key for key, is_there in zip(part, are_there, strict=True) if is_there)
            if in_order and not all(are_there):
                break
        return found

    def read(self, keys: Sequence[bytes], nbytes: int) -> Generator[Buffer | None, None, None]:
        yield from _read_ahead(self._link, keys, lambda: self._value(nbytes))

    def write(self, key: bytes, parts: Sequence[Buffer]) -> bool:
        if key not in self._removed and self.find([key], in_order=True):
            return False
        self._put(key, parts)
        self._removed.discard(key)
        return True

    def remove(self, key: bytes) -> None:
        if len(self._removed) < _MOST_REMOVED:
            self._removed.add(key)
        self._put(key, ())

    def close(self) -> None:
        self._link.close()

    def _put(self, key: bytes, parts: Sequence[Buffer]) -> None:
        self._link.expect()
        self._link.send(_asked(_PUT, key, sum(map(len, parts))), *parts)
        # A put has no answer. That to this question comes when the value is there, so that never more than one is on
        # its way.
        self._link.send(_asked(_EXIST, key))
        if self._answer()[0] != _SUCCESS:
            raise self._link.fail("a block is not there after it was stored")

    def _value(self, nbytes: int) -> Buffer | None:
        code, size = self._answer()
        if code == _FAIL:
            return None
        if size < 0:
            raise self._link.fail(f"a value of {size} bytes")
        if size > nbytes:
            self._link.close()  # rather than read what is wrong in any case
            return b""
        if size and self._link.has_ended():
            return b""
        value = self._link.receive(size)
        return value if size == nbytes else b""

    def _answer(self) -> tuple[int, int]:
        code, size, *_ = _ANSWER.unpack(self._link.receive(_ANSWER.size))
        if code not in (_SUCCESS, _FAIL):
            raise self._link.fail(f"an answer with the code {code}")
        return code, size


def _asked(command: int, key: bytes, nbytes: int = 0) -> bytes:
    name = f"tokenloom@1@0@{key.hex()}@uint8"  # LMCache reads model, workers, worker, hash and dtype
    return _ASK.pack(command, nbytes, _BYTES, 0, 0, nbytes, 0, 0, 0, name.encode().ljust(150))


def _read_ahead(
    link: Connection, keys: Sequence[bytes], receive: Callable[[], Buffer | None]
) -> Generator[Buffer | None, None, None]:
    """Yield what ``receive`` returns for each key, a few of which are asked for ahead."""
    num_sent = num_read = 0
    most_ahead = _READ_AHEAD
    try:
        while num_read < len(keys):
            try:
                link.expect(more=num_sent > num_read)
                while num_sent < min(len(keys), num_read + most_ahead):
                    link.send(_asked(_GET, keys[num_sent]))
                    num_sent += 1
                value = receive()
            except HungUpError:
                if num_sent <= num_read + 1:
                    raise
                # Which value the server does not have is known only if one is asked for alone: what had arrived before
                # the end may be lost with it.
                num_sent, most_ahead = num_read, 1
                continue
            most_ahead = _READ_AHEAD
            num_read += 1
            if not link.is_open:
                num_sent = num_read  # what was asked for ahead has no answers any more
            yield value
    finally:
        if num_sent != num_read:
            link.close()  # its remaining answers belong to calls that have given up
