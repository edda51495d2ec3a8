"""Workers that share experts meet, know each other, and notice that one of them has ended."""

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import ExpertPeers
from tokenloom.gpu_worker.parallel.experts import peer_mesh
from tokenloom.gpu_worker.parallel.experts.peer_mesh import (
    PeerLink,
    PeerListener,
    PeerMesh,
    byte_view,
    join_peers,
)

KEY = b"the key of the group"
FIRST_BEYOND_SELECT = 1024
Listeners = list[PeerListener]


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    made = [PeerListener("127.0.0.1") for _ in range(3)]
    yield made
    for listener in made:
        listener.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


def peers(listeners: Listeners, index: int, epoch: int = 1, key: bytes = KEY) -> ExpertPeers:
    return ExpertPeers(index, [[listener.endpoint] for listener in listeners], epoch, key)


def begin(threads: ThreadPoolExecutor, listeners: Listeners, epoch: int = 1) -> "list[Future[PeerMesh]]":
    return [
        threads.submit(join_peers, listener, index, peers(listeners, index, epoch))
        for index, listener in enumerate(listeners)
    ]


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(30)
    return connection


def say_hello(listener: PeerListener, sender: int, receiver: int, epoch: int = 1) -> tuple[socket.socket, bytes]:
    connection = connected(listener.endpoint)
    hello = peer_mesh._HELLO.pack(peer_mesh._MAGIC, epoch, sender, receiver, peer_mesh.ROWS, bytes(32))
    connection.sendall(hello)
    return connection, hello


def hung_up_on(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # with bytes of it unread
        return True


def test_each_sends_to_each(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    for epoch in (1, 2):
        meshes = [each.result(60) for each in begin(threads, listeners, epoch)]

        def swap(mesh: PeerMesh) -> dict[int, list[int]]:
            sent = {peer: np.full(1 << 18, 10 * mesh.index + peer, np.int64) for peer in range(3)}
            received = {peer: np.zeros(1 << 18, np.int64) for peer in range(3)}
            mesh.swap(
                {peer: byte_view(each) for peer, each in sent.items()},
                {peer: byte_view(each) for peer, each in received.items()},
            )
            return {peer: np.unique(each).tolist() for peer, each in received.items() if peer != mesh.index}

        for mesh, received in zip(meshes, threads.map(swap, meshes), strict=True):
            assert received == {peer: [10 * peer + mesh.index] for peer in range(3) if peer != mesh.index}
        for mesh in meshes:
            mesh.close()


def test_weights_move_beside_the_rows(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    links = [PeerLink(each.result(60)) for each in begin(threads, listeners)]
    sums = list(threads.map(lambda link: link.add(torch.tensor([link.rank, 1])).tolist(), links))
    assert sums == [[3, 3]] * 3
    weights = torch.arange(1 << 16, dtype=torch.int64).view(torch.uint8)
    received = torch.zeros_like(weights)
    half = len(weights) // 2
    pending = [links[0].send(weights[:half], 2, 0), links[0].send(weights[half:], 2, 1)]
    pending += [links[2].receive(received[:half], 0, 0), links[2].receive(received[half:], 0, 1)]
    for each in pending:
        each.wait()
    assert torch.equal(received, weights)
    for link in links:
        link._mesh.close()
        link.close()


def test_a_stranger_is_not_taken_for_a_worker(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    """Neither one without the key, nor one that sends back what the worker itself has proved."""
    two = listeners[:2]
    first = threads.submit(join_peers, two[0], 0, peers(two, 0))
    for proof_of in (lambda answer: bytes(32), lambda answer: answer[32:]):
        stranger, _ = say_hello(two[0], 1, 0)
        answer = peer_mesh._read(stranger, peer_mesh._ANSWER.size)
        stranger.sendall(proof_of(answer))
        assert stranger.recv(1) == b"", "it is hung up on"
        stranger.close()
    for magic in (b"GET / HTTP/1.1\r\n" + bytes(100), peer_mesh._MAGIC + b"\xff" * 200):
        stranger = connected(two[0].endpoint)
        stranger.sendall(magic)
        assert hung_up_on(stranger)
        stranger.close()
    assert not first.done()
    second = join_peers(two[1], 1, peers(two, 1))
    assert set(first.result(60).incoming) == {(1, peer_mesh.ROWS), (1, peer_mesh.MOVES)}
    second.close()
    first.result().close()


def test_a_worker_proves_itself_before_it_is_told_anything(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    two = listeners[:2]
    first = threads.submit(join_peers, two[0], 0, peers(two, 0))
    stranger, hello = say_hello(two[0], 1, 0)
    nonce, proof = peer_mesh._ANSWER.unpack(peer_mesh._read(stranger, peer_mesh._ANSWER.size))
    assert hmac.compare_digest(proof, hmac.digest(KEY, hello + nonce + b"receiver", hashlib.sha256))
    stranger.close()
    impostor, _ = two[1]._socket.accept()  # takes the connection of the first worker
    impostor.settimeout(30)
    peer_mesh._read(impostor, peer_mesh._HELLO.size)
    impostor.sendall(bytes(peer_mesh._ANSWER.size))
    assert impostor.recv(1) == b"", "without the key it gets no proof"
    impostor.close()
    two[1].close()
    with pytest.raises(PeerLostError, match="has ended"):
        first.result(60)


def test_peers_of_another_epoch_do_not_meet(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    two = listeners[:2]
    late = threads.submit(join_peers, two[0], 0, peers(two, 0, epoch=2))
    early, _ = say_hello(two[0], 1, 0, epoch=3)
    assert early.recv(1) == b"", "it tries again until the other one has come so far"
    early.close()
    with pytest.raises(PeerLostError, match="has other peers by now"):
        join_peers(two[1], 1, peers(two, 1, epoch=1))
    other = join_peers(two[1], 1, peers(two, 1, epoch=2))
    late.result(60).close()
    other.close()


def test_a_worker_that_ends_while_they_join_is_noticed(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    two = listeners[:2]
    first = threads.submit(join_peers, two[0], 0, peers(two, 0))
    two[1]._socket.accept()[0].close()
    two[1].close()
    with pytest.raises(PeerLostError, match=r"worker 1 at 127.0.0.1:\d+ has ended"):
        first.result(60)


def test_a_worker_that_ends_releases_those_that_wait_for_it(listeners: Listeners, threads: ThreadPoolExecutor) -> None:
    """Also those that wait for another one, which notices it."""
    meshes = [each.result(60) for each in begin(threads, listeners)]
    place, empty = memoryview(bytearray(8)), memoryview(b"")
    waiting = threads.submit(meshes[0].swap, {}, {1: place})
    between = threads.submit(meshes[1].swap, {2: memoryview(bytes(1 << 26))}, {2: empty})
    meshes[2].close()
    for future in (between, waiting):
        with pytest.raises(PeerLostError):
            future.result(60)
    with pytest.raises(PeerLostError):
        meshes[0].swap({1: place}, {})


def test_a_connection_that_says_nothing_holds_nobody_up(
    listeners: Listeners, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_mesh, "_PROOF_SECONDS", 0.2)
    two = listeners[:2]
    silent = [connected(two[0].endpoint) for _ in range(3)]
    meshes = [each.result(60) for each in begin(threads, two)]
    for connection in silent:
        connection.close()
    for mesh in meshes:
        mesh.close()


def test_workers_with_many_open_files_meet(
    listeners: Listeners, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_mesh, "_JOIN_SECONDS", 10.0)
    with contextlib.ExitStack() as files:
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= FIRST_BEYOND_SELECT:
            files.callback(os.close, fd)
        files.callback(os.close, fd)
        high = [PeerListener("127.0.0.1") for _ in range(3)]
        for listener in high:
            files.callback(listener.close)
        for mesh in [future.result(30) for future in begin(threads, high)]:
            mesh.close()


def test_a_worker_without_a_thread_to_give_takes_the_next_connection(
    listeners: Listeners, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [peer_mesh._MOST_HANDSHAKES]
    start = threading.Thread.start

    def fails_first(thread: threading.Thread) -> None:
        if thread.name == "expert-peer" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_first)
    for mesh in [future.result(30) for future in begin(threads, listeners)]:
        mesh.close()


def test_a_worker_on_another_machine_than_its_core_listens_at_an_address_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create, core = socket.create_server, "127.0.0.7"

    def only_here(address: tuple[str, int], **options: int) -> socket.socket:
        if address[0] == core:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", only_here)
    listener = PeerListener(core)
    assert listener.endpoint.startswith("127.0.0.1:"), "from which the core's machine is reached"
    connected(listener.endpoint).close()
    listener.close()
