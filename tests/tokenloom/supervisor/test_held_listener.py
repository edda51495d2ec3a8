"""The sockets that keep a gateway's ports."""

import socket
import sys
from collections.abc import Callable

import pytest

from tokenloom.supervisor.held_listener import PortTaken, hold_grpc, hold_http, is_listening, reserve

HOST = "127.0.0.1"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a program choose the socket")


def gateway_socket(held: socket.socket) -> socket.socket:
    """Listen on the same port, as gRPC does."""
    shared = socket.socket(held.family)
    if held.family == socket.AF_INET6:
        shared.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    shared.bind(held.getsockname()[:2])
    shared.listen()
    return shared


def num_waiting(listener: socket.socket) -> int:
    listener.setblocking(False)
    count = 0
    while True:
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return count
        accepted.close()
        count += 1


def connect(port: int, count: int = 20) -> None:
    for _ in range(count):
        socket.create_connection((HOST, port)).close()


def test_a_gateway_gets_every_connection_while_it_listens() -> None:
    with hold_grpc(HOST, 0) as held:
        port = held.getsockname()[1]
        for _ in range(2):  # two incarnations
            connect(port)
            assert num_waiting(held) == 20
            with gateway_socket(held) as gateway:
                connect(port)
                assert num_waiting(gateway) == 20
                assert num_waiting(held) == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", HOST])
def test_any_host_is_held(host: str) -> None:
    with hold_grpc(host, 0) as held, gateway_socket(held) as gateway:
        connect(held.getsockname()[1], 3)
        assert num_waiting(gateway) == 3


def test_only_a_reserved_socket_does_not_listen() -> None:
    with reserve(HOST, 0) as reserved, hold_http(HOST, 0) as http, hold_grpc(HOST, 0) as grpc:
        assert [is_listening(each) for each in (reserved, http, grpc)] == [False, True, True]


@pytest.mark.parametrize("host", ["a" * 300, "x\udc80", "a..b"])
@pytest.mark.parametrize("open_one", [reserve, hold_http, hold_grpc])
def test_what_is_no_name_of_a_host_is_named(open_one: Callable[[str, int], socket.socket], host: str) -> None:
    with pytest.raises(PortTaken, match="cannot bind"):
        open_one(host, 0)
