"""Connections between the workers over which experts are spread: each proves that it belongs to the group before
anything else is read from it, and everything that is read has a size that both sides know.

Each worker connects to each other one and sends over that connection alone. So it learns at once that another worker
has ended, whichever of both waits. What travels is not encrypted.
"""

import contextlib
import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import ExpertPeers

ROWS: Final = 0
"""The channel for rows of a step."""
MOVES: Final = 1
"""The channel for weights, which travel while steps are computed."""
_CHANNELS = (ROWS, MOVES)

_JOIN_SECONDS = 600.0
"""How long all workers together may take to load experts and to connect. One that ends is noticed at once."""
_PROOF_SECONDS = 5.0
"""How long one connection may take to prove what it is."""
_RETRY_SECONDS = 0.02
_LOOK_SECONDS = 0.1
_MOST_HANDSHAKES = 64
"""Connections that may be proving themselves at the same time; others are closed, and are tried again by peers."""
_BACKLOG = 256

_GONE = select.POLLERR | select.POLLHUP | select.POLLRDHUP

_MAGIC = b"TLPEERS1"
_HELLO = struct.Struct("<8sQIIB32s")
"""Magic, epoch, sender, receiver, channel, nonce of the sender."""
_ANSWER = struct.Struct("<32s32s")
"""Nonce of the receiver, and its proof."""
_PROOF_BYTES = 32
_GONE_ON = b"\xff" * _ANSWER.size
"""The answer to a peer of an earlier epoch, which would wait in vain."""

_Place = tuple[int, int]
"""A peer and a channel."""


class PeerListener:
    """Takes the connections of other workers; lives as long as its worker.

    Attributes:
        endpoint: ``HOST:PORT`` at which it can be reached.
    """

    def __init__(self, host: str) -> None:
        """``host``: the address of this machine at which the others reach it, or that of the core's machine if this is
        another one. Raises ``OSError``."""
        try:
            self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            host = _address_towards(host)  # a worker that Ray has put on another machine
            self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self.endpoint = f"{host}:{self._socket.getsockname()[1]}"

    def accept(self, seconds: float) -> socket.socket | None:
        """Return the next connection; None: there was none in so many seconds, or the listener is closed."""
        try:
            if _readable([self._socket], seconds):
                return self._socket.accept()[0]
        except (OSError, ValueError):  # closed, or no descriptor to give now
            time.sleep(_RETRY_SECONDS)
        return None

    def close(self) -> None:
        """Take no more connections. Idempotent."""
        self._socket.close()


def _address_towards(host: str) -> str:
    """Return the address of this machine from which another one is reached. Raises ``OSError``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds the interface; nothing is sent
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


class PeerMesh:
    """Holds the connections of one worker to all others. Used from one thread, apart from what :class:`PeerLink`
    moves."""

    def __init__(self, index: int, size: int) -> None:
        """``index``: of this worker among ``size``."""
        self.index = index
        self.size = size
        self.outgoing: dict[_Place, socket.socket] = {}
        self.incoming: dict[_Place, socket.socket] = {}

    def swap(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> None:
        """Send bytes to peers while bytes of peers arrive; both sides know the sizes. Raises :class:`PeerLostError`."""
        out = {peer: view for peer, view in sent.items() if len(view) and peer != self.index}
        into = {peer: view for peer, view in received.items() if len(view) and peer != self.index}
        try:
            while out or into:
                moved = [self._send_some(out, peer) for peer in list(out)]
                moved += [self._receive_some(into, peer) for peer in list(into)]
                if not any(moved):
                    self._wait(out, into)
        except OSError as error:
            self.close()  # those that wait for this worker must not wait for ever
            raise PeerLostError(f"a worker that shares the experts is lost: {error}") from None

    def _send_some(self, out: dict[int, memoryview], peer: int) -> bool:
        try:
            count = self.outgoing[peer, ROWS].send(out[peer], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        if count == len(out[peer]):
            del out[peer]
        else:
            out[peer] = out[peer][count:]
        return True

    def _receive_some(self, into: dict[int, memoryview], peer: int) -> bool:
        try:
            count = self.incoming[peer, ROWS].recv_into(into[peer], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionError("it has closed its connection")
        if count == len(into[peer]):
            del into[peer]
        else:
            into[peer] = into[peer][count:]
        return True

    def _wait(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> None:
        poll = select.poll()
        for peer in out:
            poll.register(self.outgoing[peer, ROWS], select.POLLOUT)
        arriving = {self.incoming[peer, ROWS].fileno(): peer for peer in {*out, *into}}
        for fd, peer in arriving.items():
            poll.register(fd, select.POLLRDHUP | (select.POLLIN if peer in into else 0))
        for fd, events in poll.poll():
            # What is sent may wait for minutes on a machine that is gone; its idle connection to here ends in seconds.
            if events & _GONE and arriving.get(fd, -1) not in into and fd in arriving:
                raise ConnectionError("it has closed its connection")

    def close(self) -> None:
        """End all connections, so that no other worker waits for this one. Idempotent."""
        for connection in (*self.outgoing.values(), *self.incoming.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class PeerLink:
    """Fulfils :class:`.transfer.WeightLink` over a mesh. Messages to one peer arrive in the order in which they were
    sent, and are received in that order."""

    def __init__(self, mesh: PeerMesh) -> None:
        self.rank, self.size = mesh.index, mesh.size
        self._mesh = mesh
        self._threads: dict[tuple[int, bool], ThreadPoolExecutor] = {}  # by peer and direction, made when used

    def send(self, x: Tensor, rank: int, tag: int) -> "_PendingBytes":
        connection = self._mesh.outgoing[rank, MOVES]
        return self._begin(rank, True, lambda: connection.sendall(_bytes_of(x)))

    def receive(self, x: Tensor, rank: int, tag: int) -> "_PendingBytes":
        connection = self._mesh.incoming[rank, MOVES]
        return self._begin(rank, False, lambda: _fill(connection, _bytes_of(x)))

    def add(self, x: Tensor) -> Tensor:
        mesh, view = self._mesh, _bytes_of(x)
        others = [peer for peer in range(mesh.size) if peer != mesh.index]
        arrived = {peer: torch.empty_like(x) for peer in others}
        mesh.swap(dict.fromkeys(others, view), {peer: _bytes_of(each) for peer, each in arrived.items()})
        return x + sum(arrived.values(), torch.zeros_like(x))

    def _begin(self, rank: int, sends: bool, transfer: Callable[[], None]) -> "_PendingBytes":
        thread = self._threads.get((rank, sends))
        if thread is None:
            thread = self._threads[rank, sends] = ThreadPoolExecutor(1, thread_name_prefix="expert-moves")
        return _PendingBytes(thread.submit(transfer), self._mesh)

    def close(self) -> None:
        """End the threads; the mesh is closed, so that none of them waits. Idempotent."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()


class _PendingBytes:
    def __init__(self, future: "Future[None]", mesh: PeerMesh) -> None:
        self._future, self._mesh = future, mesh

    def wait(self) -> None:
        """Return when the bytes have been passed on or have arrived. Raises :class:`PeerLostError`."""
        try:
            self._future.result()
        except OSError as error:
            self._mesh.close()
            raise PeerLostError(f"a worker that shares the experts is lost: {error}") from None


def _bytes_of(x: Tensor) -> memoryview:
    return x.contiguous().view(torch.uint8).flatten().numpy().data


def byte_view(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> memoryview:
    """Return the bytes of a contiguous array."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        if not (count := connection.recv_into(view)):
            raise ConnectionError("it has closed its connection")
        view = view[count:]


class _Joining:
    """Collects the connections of one mesh."""

    def __init__(self, listener: PeerListener, index: int, peers: ExpertPeers) -> None:
        self._listener, self._index, self._peers = listener, index, peers
        self._endpoints = [endpoint for workers in peers.workers for endpoint in workers]
        self.mesh = PeerMesh(index, len(self._endpoints))
        self._arrived = threading.Condition()
        self._num_handshakes = 0
        self._is_over = False
        self._ends_at = time.monotonic() + _JOIN_SECONDS

    def run(self) -> PeerMesh:
        """Connect to all others, and wait until all have connected. Raises :class:`PeerLostError`."""
        others = [(peer, channel) for peer in range(self.mesh.size) if peer != self._index for channel in _CHANNELS]
        threading.Thread(target=self._accept, name="expert-peers", daemon=True).start()
        try:
            for peer, channel in others:
                self.mesh.outgoing[peer, channel] = self._connect(peer, channel)
            with self._arrived:
                while len(self.mesh.incoming) < len(others):
                    self._arrived.wait(_LOOK_SECONDS)
                    self._check_peers()
        except BaseException:
            self.mesh.close()
            raise
        finally:
            with self._arrived:
                self._is_over = True
        return self.mesh

    def _check_peers(self) -> None:
        """Raise :class:`PeerLostError` if one that this worker has connected to is gone, or if time is over."""
        if _readable(self.mesh.outgoing.values()):  # nothing is ever sent back over these
            raise PeerLostError("a worker that shares the experts ended while they joined")
        if time.monotonic() > self._ends_at:
            raise PeerLostError(f"the workers that share the experts have not joined within {_JOIN_SECONDS:g} s")

    def _connect(self, peer: int, channel: int) -> socket.socket:
        while True:
            try:
                return self._connect_once(peer, channel)
            except ConnectionRefusedError:  # its listener ends with its process
                raise PeerLostError(f"worker {peer} at {self._endpoints[peer]} has ended") from None
            except OSError as error:  # it has not come so far, or has other peers by now
                if time.monotonic() > self._ends_at:
                    raise PeerLostError(f"worker {peer} at {self._endpoints[peer]} does not join: {error}") from None
            time.sleep(_RETRY_SECONDS)

    def _connect_once(self, peer: int, channel: int) -> socket.socket:
        host, _, port = self._endpoints[peer].rpartition(":")
        connection = socket.create_connection((host, int(port)), _PROOF_SECONDS)
        try:
            _notice_loss(connection)
            hello = _HELLO.pack(_MAGIC, self._peers.epoch, self._index, peer, channel, secrets.token_bytes(32))
            connection.sendall(hello)
            connection.settimeout(max(_RETRY_SECONDS, self._ends_at - time.monotonic()))
            answer = _read(connection, _ANSWER.size)
            if answer == _GONE_ON:
                raise PeerLostError(f"worker {peer} at {self._endpoints[peer]} has other peers by now")
            nonce, proof = _ANSWER.unpack(answer)
            if not hmac.compare_digest(proof, self._proof(b"receiver", hello, nonce)):
                raise ConnectionError("it does not know the key of the group")
            connection.sendall(self._proof(b"sender", hello, nonce))
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self) -> None:
        while not self._is_over:
            if (connection := self._listener.accept(_LOOK_SECONDS)) is None:
                continue
            with self._arrived:
                is_taken = not self._is_over and self._num_handshakes < _MOST_HANDSHAKES
                self._num_handshakes += is_taken
            if is_taken:
                self._begin_taking(connection)
            else:
                connection.close()

    def _begin_taking(self, connection: socket.socket) -> None:
        try:
            threading.Thread(target=self._take, args=(connection,), name="expert-peer", daemon=True).start()
        except RuntimeError:  # the system has no thread to give now; a peer tries again
            connection.close()
            with self._arrived:
                self._num_handshakes -= 1

    def _take(self, connection: socket.socket) -> None:
        try:
            place = self._prove(connection)
            with self._arrived:
                if self._is_over or place in self.mesh.incoming:
                    raise ConnectionError("this worker does not expect the connection")
                self.mesh.incoming[place] = connection
                self._arrived.notify()
        except OSError:
            connection.close()
        finally:
            with self._arrived:
                self._num_handshakes -= 1

    def _prove(self, connection: socket.socket) -> _Place:
        """Return whose connection it is. Raises ``OSError`` for one of a stranger, or for other peers."""
        ends_at = time.monotonic() + _PROOF_SECONDS
        hello = _read(connection, _HELLO.size, ends_at)
        magic, epoch, sender, receiver, channel, _ = _HELLO.unpack(hello)
        is_known = sender < self.mesh.size and sender != self._index and channel in _CHANNELS
        if magic == _MAGIC and epoch < self._peers.epoch:
            connection.sendall(_GONE_ON)
        if (magic, epoch, receiver) != (_MAGIC, self._peers.epoch, self._index) or not is_known:
            raise ConnectionError("it looks for other peers")
        nonce = secrets.token_bytes(32)
        connection.sendall(_ANSWER.pack(nonce, self._proof(b"receiver", hello, nonce)))
        proof = _read(connection, _PROOF_BYTES, ends_at)
        if not hmac.compare_digest(proof, self._proof(b"sender", hello, nonce)):
            raise ConnectionError("it does not know the key of the group")
        connection.settimeout(None)
        _notice_loss(connection)
        return sender, channel

    def _proof(self, side: bytes, hello: bytes, nonce: bytes) -> bytes:
        # The parts have fixed sizes apart from the side, which comes last: no two lists of parts are the same bytes.
        return hmac.digest(self._peers.key, hello + nonce + side, hashlib.sha256)


def join_peers(listener: PeerListener, index: int, peers: ExpertPeers) -> PeerMesh:
    """Connect to all ``peers``, of which this worker is the one at ``index``, counted over all engines, and wait for
    them. Raises :class:`PeerLostError` if one of them ends meanwhile."""
    return _Joining(listener, index, peers).run()


def _readable(sockets: Iterable[socket.socket], seconds: float = 0.0) -> bool:
    """Return whether one of them has bytes or has ended, or does within so many seconds."""
    poll = select.poll()  # not select, which takes no descriptor above 1023
    for each in sockets:
        poll.register(each, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _read(connection: socket.socket, count: int, ends_at: float | None = None) -> bytes:
    """Return exactly so many bytes. Raises ``OSError``."""
    parts: list[bytes] = []
    while count:
        if ends_at is not None:
            if (left := ends_at - time.monotonic()) <= 0:
                raise TimeoutError("it takes too long to say what it is")
            connection.settimeout(left)
        part = connection.recv(count)
        if not part:
            raise ConnectionError("it has closed its connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _notice_loss(connection: socket.socket) -> None:
    """Send at once, and let the idle connection end within three seconds if the other machine is lost."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # No TCP_USER_TIMEOUT: it also ends a connection whose reader computes a long step and takes no bytes meanwhile.
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
