"""A gRPC client that ignores the limits which the server announces, and opens as many streams as it likes."""

import contextlib
import socket
import struct
import threading
from types import TracebackType

from tests.attack.wire import SECONDS

GENERATE = "/tokenloom.v1.Inference/Generate"
SESSION = "/tokenloom.v1.Inference/GenerateSession"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = END_STREAM = 1
_END_HEADERS = 4
_LARGE_WINDOW = (1 << 30) - 1
_INITIAL_WINDOW_SIZE = 4


class Http2:
    """One connection; a thread reads what the server sends.

    Attributes:
        ended: Ids of the streams that the server has ended, with a gRPC status or a reset.
        answered: Ids of the streams that the server has sent a message.
        gone: Whether the server has sent GOAWAY or closed the connection.
    """

    def __init__(self, address: str, key: str, path: str = SESSION, peer: str = "127.0.0.1") -> None:
        host, _, port = address.rpartition(":")
        self._headers = _header_block(path, address, key)
        self._next_stream = 1
        self._lock = threading.Lock()
        self._socket = socket.socket()
        self._socket.settimeout(SECONDS)
        self._socket.bind((peer, 0))
        self._socket.connect((host, int(port)))
        self.ended: set[int] = set()
        self.answered: set[int] = set()
        self.gone = False
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGE_WINDOW)
        window = struct.pack(">I", _LARGE_WINDOW)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, window))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Http2":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and wait for the reader."""
        with contextlib.suppress(OSError):  # the server may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    @property
    def num_open(self) -> int:
        """How many streams the server has not ended."""
        return self._next_stream // 2 - len(self.ended)

    def open_streams(self, num: int, message: bytes | None = None) -> None:
        """Open so many streams and leave them open. ``message``: the first protobuf message of each."""
        data = b"" if message is None else struct.pack(">BI", 0, len(message)) + message
        for first in range(0, num, 500):
            frames = []
            for _ in range(min(500, num - first)):
                frames.append(_frame(_HEADERS, _END_HEADERS, self._next_stream, self._headers))
                if message is not None:
                    frames.append(_frame(_DATA, 0, self._next_stream, data))
                self._next_stream += 2
            self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            self.gone = True

    def _read(self) -> None:
        data = bytearray()
        while True:
            try:
                piece = self._socket.recv(1 << 16)
            except OSError:
                piece = b""
            if not piece:
                self.gone = True
                return
            data += piece
            at = 0
            while len(data) - at >= 9 and len(data) - at - 9 >= (size := int.from_bytes(data[at : at + 3], "big")):
                stream = int.from_bytes(data[at + 5 : at + 9], "big")
                self._on_frame(data[at + 3], data[at + 4], stream, bytes(data[at + 9 : at + 9 + size]))
                at += 9 + size
            del data[:at]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            self.gone = True
        elif kind == _RST or (kind == _HEADERS and flags & END_STREAM):
            self.ended.add(stream)
        elif kind == _DATA:
            self.answered.add(stream)
            if payload:
                self._write(_frame(_WINDOW, 0, 0, struct.pack(">I", len(payload))))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def _header_block(path: str, address: str, key: str) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address}
    fields |= {"te": "trailers", "content-type": "application/grpc"}
    if key:
        fields["authorization"] = f"Bearer {key}"
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields.items())


def _string(text: str) -> bytes:
    assert len(text) < 127, "a longer string needs a longer length"
    return bytes((len(text),)) + text.encode()
