"""Bytes over one connection: a client that sends whatever it likes and observes when the server closes."""

import json
import select
import socket
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from tests.attack.target import Target

SECONDS = 120.0
"""What takes longer hangs."""
_SEND_BUFFER = 64 << 10
"""Small, so that bytes that were sent are bytes that the server took, but for so many and its own buffer."""


def head(target: Target, path: str = "/v1/completions", key: str = "", **fields: str) -> bytes:
    """Return the head of a JSON request; an underscore in a field's name stands for a dash."""
    names = {"Host": f"{target.host}:{target.port}", "Content-Type": "application/json"}
    if key:
        names["Authorization"] = f"Bearer {key}"
    names |= {name.replace("_", "-"): value for name, value in fields.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def post(target: Target, body: bytes, path: str = "/v1/completions", key: str = "") -> bytes:
    """Return a whole request."""
    return head(target, path, key, Content_Length=str(len(body)), Connection="close") + body


def request(target: Target, key: str, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
    """Send an orderly request. Returns the status and the answer's JSON, or its text."""
    with Wire(target) as wire:
        wire.send(post(target, json.dumps(body).encode(), path, key))
        status, answer = wire.answer()
    text = answer.partition(b"\r\n\r\n")[2]
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")


class Wire:
    """A connection to the gateway's HTTP port. ``peer``: the loopback address that it comes from."""

    def __init__(self, target: Target, peer: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._socket.settimeout(SECONDS)
        self._socket.bind((peer, 0))
        self._socket.connect((target.host, target.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._seen = b""

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """Send all bytes. Returns False if the server has closed the connection."""
        try:
            self._socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def send_until_closed(self, pieces: Iterable[bytes], careful: int) -> int | None:
        """Send pieces until the server closes. Returns how many bytes it let pass; None: it took all of them.

        ``careful``: Bytes from the beginning between which the client gives the server time to close.
        """
        num_bytes = 0
        for piece in pieces:
            if self.is_closed(0.05 if num_bytes < careful else 0.0) or not self.send(piece):
                return num_bytes
            num_bytes += len(piece)
        return num_bytes if self.is_closed(5.0) else None

    def is_closed(self, timeout: float) -> bool:
        """Whether the server closes the connection within the timeout; :attr:`status` is of what came before."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return False
            try:
                piece = self._socket.recv(1 << 16)
                self._seen = (self._seen + piece)[:64]
                if not piece:
                    return True
            except ConnectionError:
                return True

    @property
    def status(self) -> int:
        """The status of the answer that `is_closed` has read; 0: none."""
        return status_of(self._seen)

    def answer(self) -> tuple[int, bytes]:
        """Read to the end. Returns the status, 0 without an answer, and all bytes. Raises `TimeoutError`."""
        data = bytearray()
        try:
            while piece := self._socket.recv(1 << 18):
                data += piece
        except ConnectionError:
            pass
        return status_of(data), bytes(data)

    def first_byte(self) -> tuple[int, float]:
        """Wait for the answer to begin. Returns its status, 0 without an answer, and the time of its first byte."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        return status_of(data), time.monotonic()


def status_of(data: bytes | bytearray) -> int:
    """Return the status that an answer begins with; 0: none."""
    words = bytes(data[:32]).split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0
