"""A small server that speaks the protocol of LMCache's (``python -m lmcache.v1.server``, 0.5.6), and can misbehave."""

import contextlib
import socket
import struct
import threading

PUT, GET, EXIST, HEALTH = 1, 2, 3, 5
ASK, ANSWER = struct.Struct("<9i150s"), struct.Struct("<9i")
SUCCESS, FAIL = 200, 400


class LMCacheServer:
    """Listens on a port of this host until it is closed.

    Attributes:
        values: By key, as clients wrote them.
        asked: All requests, without what was put: (command, size, key).
    """

    def __init__(self, port: int = 0) -> None:
        self.values: dict[bytes, bytes] = {}
        self.asked: list[tuple[int, int, bytes]] = []
        self.answers = threading.Event()
        """Cleared: no request is answered before it is set."""
        self.answers.set()
        self.hangs_up_after: int | None = None
        """So many bytes of the next value are sent before the connection ends."""
        self.torn: dict[bytes, int] = {}
        """By key: the sizes of values whose clients ended within the put. As the real one, it hangs up on who asks."""
        self._server = socket.create_server(("127.0.0.1", port))
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End all connections."""
        self.answers.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(30)

    def hang_up(self) -> None:
        """End the connections that there are."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self._connections.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            while True:
                command, size, *_, key = ASK.unpack(_receive(connection, ASK.size))
                self.asked.append((command, size, key.strip()))
                if command == PUT:
                    try:
                        self.values[key.strip()] = _receive(connection, size)
                    except EOFError:
                        self.torn[key.strip()] = size
                        raise
                    self.torn.pop(key.strip(), None)
                    continue
                self.answers.wait()
                if (size := self.torn.get(key.strip(), 0)) and command in (GET, EXIST):
                    connection.sendall(ANSWER.pack(SUCCESS, size if command == GET else 0, 4, 0, 0, 0, 0, 0, 0))
                    if command == GET:
                        return
                    continue
                value = self.values.get(key.strip())
                if command == GET and value is not None:
                    connection.sendall(ANSWER.pack(SUCCESS, len(value), 4, 0, len(value), 0, 0, 0, 0))
                    connection.sendall(value[: self.hangs_up_after])
                    if self.hangs_up_after is not None:
                        self.hangs_up_after = None
                        return
                else:
                    code = FAIL if value is None and command != HEALTH else SUCCESS
                    connection.sendall(ANSWER.pack(code, 0, 1, 2, 0, 0, 0, 0, 0))


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        if not (piece := connection.recv(nbytes - len(data))):
            raise EOFError
        data += piece
    return data
