"""Ports of the gateways."""

import socket
import sys
from collections.abc import Callable

import pytest

from tokenloom.supervisor.ports import (
    GatewayPorts,
    PortTaken,
    held_ports,
    hold_grpc,
    hold_http,
    is_listening,
    reserve,
    reserved_ports,
)

HOST = "127.0.0.1"


@pytest.fixture
def taken() -> int:
    """A free port of this moment, so that the ports from it can be given by number."""
    with reserved_ports(HOST, 2, 0, 0) as ports:
        return ports[0].http


def test_given_ports_follow_each_other(taken: int) -> None:
    with reserved_ports("127.0.0.99", 2, taken, taken + 10) as ports:
        assert ports == [GatewayPorts(taken, taken + 10), GatewayPorts(taken + 1, taken + 11)]


def test_grpc_is_a_thousand_above_http(taken: int) -> None:
    with reserved_ports("127.0.0.99", 1, taken, None) as ports:
        assert ports == [GatewayPorts(taken, taken + 1000)]


@pytest.mark.parametrize(("http", "grpc"), [(False, None), (False, 0), (True, 0), (False, 9000)])
def test_zero_is_a_free_port(http: bool, grpc: int | None, taken: int) -> None:
    with reserved_ports("127.0.0.98", 2, taken if http else 0, grpc) as pairs:
        ports = [port for pair in pairs for port in (pair.http, pair.grpc)]
    assert len(set(ports)) == 4
    assert 0 not in ports
    assert not http or pairs[1].http == taken + 1


def test_a_reserved_port_is_free_for_the_gateway_alone() -> None:
    with reserved_ports(HOST, 1, 0, None) as ports, socket.socket() as other, socket.socket() as gateway:
        with pytest.raises(OSError, match="in use"):
            other.bind((HOST, ports[0].http))
        gateway.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        gateway.bind((HOST, ports[0].http))
        gateway.listen()
        with socket.create_connection((HOST, ports[0].http)) as client:
            accepted, address = gateway.accept()
            accepted.close()
            assert address == client.getsockname()


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot bind {HOST}:{port}"), reserved_ports(HOST, 1, port, 0):
            pass


def test_ports_end_at_65535() -> None:
    with (
        pytest.raises(PortTaken, match=r"cannot bind 127.0.0.1:65536: ports end at 65535"),
        reserved_ports(HOST, 1, 0, 65536),
    ):
        pass


def test_held_ports_listen_for_the_gateways() -> None:
    with held_ports(HOST, 2, 0, 0) as ports:
        for port in ports:
            assert port.http_descriptor is not None
            with socket.create_connection((HOST, port.http)), socket.create_server((HOST, 0)) as other:
                assert other.getsockname()[1] not in (port.http, port.grpc)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, ports[0].http))


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_port_that_is_held_is_taken(kind: str) -> None:
    with held_ports(HOST, 1, 0, 0) as [ports]:
        taken = ports.http if kind == "http" else ports.grpc
        with pytest.raises(PortTaken, match=f"cannot bind {HOST}:{taken}"), held_ports(HOST, 1, 0, taken):
            pass


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
