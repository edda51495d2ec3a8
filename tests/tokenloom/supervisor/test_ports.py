"""Ports of the gateways."""

import socket

import pytest

from tokenloom.supervisor.ports import GatewayPorts, PortTaken, held_ports, reserved_ports

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
