import socket
import threading
from pathlib import Path

import pytest

from tokenloom.gpu_worker.kv_connector.listener import KVListener


@pytest.fixture
def server() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def connect(server: socket.socket) -> socket.socket:
    sock = socket.create_connection(server.getsockname(), 30)
    sock.settimeout(30)
    return sock


def echo(connection: socket.socket) -> None:
    while data := connection.recv(100):
        connection.sendall(data)


def test_serves_each_connection_beside_the_others(server: socket.socket) -> None:
    listener = KVListener(server, echo, name="test", max_connections=4)
    with connect(server) as first, connect(server) as second:
        for sock, data in ((second, b"2"), (first, b"1"), (second, b"22")):
            sock.sendall(data)
            assert sock.recv(100) == data
    listener.close()


def test_closes_what_is_too_many_and_takes_the_next_when_one_ends(server: socket.socket) -> None:
    ended = threading.Semaphore(0)

    def serve(connection: socket.socket) -> None:
        echo(connection)
        ended.release()

    listener = KVListener(server, serve, name="test", max_connections=1)
    with connect(server) as first:
        first.sendall(b"x")
        assert first.recv(1) == b"x"
        with connect(server) as second:
            assert second.recv(1) == b""
    assert ended.acquire(timeout=30)
    data = b""
    while data != b"x":  # the thread that ended may not be counted off yet
        with connect(server) as third:
            try:
                third.sendall(b"x")
                data = third.recv(1)
            except ConnectionError:
                continue
    listener.close()


def test_an_error_of_the_connection_ends_only_it(server: socket.socket) -> None:
    def serve(connection: socket.socket) -> None:
        if connection.recv(1) == b"!":
            raise ConnectionError
        connection.sendall(b"x")

    listener = KVListener(server, serve, name="test", max_connections=4)
    with connect(server) as first, connect(server) as second:
        first.sendall(b"!")
        assert first.recv(1) == b""
        second.sendall(b"?")
        assert second.recv(1) == b"x"
    listener.close()


def test_a_bug_that_one_connection_meets_is_logged_and_ends_only_it(
    server: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    def serve(connection: socket.socket) -> None:
        if connection.recv(1) == b"!":
            raise KeyError("a bug")
        connection.sendall(b"x")

    listener = KVListener(server, serve, name="test", max_connections=4)
    with connect(server) as first, connect(server) as second:
        first.sendall(b"!")
        assert first.recv(1) == b""
        second.sendall(b"?")
        assert second.recv(1) == b"x"
    listener.close()
    assert "test: a connection ended because of a bug" in caplog.text


def test_a_connection_without_a_thread_is_closed_and_the_next_one_is_served(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = KVListener(server, echo, name="test", max_connections=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", without_threads)
        with connect(server) as first:
            assert first.recv(1) == b""
    with connect(server) as second:
        second.sendall(b"x")
        assert second.recv(1) == b"x"
    listener.close()
    assert "test: a connection is not served: can't start new thread" in caplog.text


def without_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_close_hangs_up_and_leaves_no_thread(server: socket.socket) -> None:
    before = threading.active_count()
    listener = KVListener(server, echo, name="test", max_connections=4)
    with connect(server) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        assert threading.active_count() == before + 2
        listener.close()
        listener.close()
        assert sock.recv(1) == b""
    assert threading.active_count() == before
    assert server.fileno() < 0


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "s"))
    listener = KVListener(server, echo, name="test", max_connections=4)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "s"))
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    listener.close()
