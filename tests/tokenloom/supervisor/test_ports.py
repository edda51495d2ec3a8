"""Ports of the gateways."""

import pytest

from tokenloom.supervisor.ports import GatewayPorts, choose_ports


def test_given_ports_follow_each_other() -> None:
    assert choose_ports("127.0.0.1", 2, 8000, 7000) == [GatewayPorts(8000, 7000), GatewayPorts(8001, 7001)]


def test_grpc_is_a_thousand_above_http() -> None:
    assert choose_ports("127.0.0.1", 1, 8000, None) == [GatewayPorts(8000, 9000)]


@pytest.mark.parametrize(("http", "grpc"), [(0, None), (0, 0), (8000, 0), (0, 9000)])
def test_zero_is_a_free_port(http: int, grpc: int | None) -> None:
    pairs = choose_ports("127.0.0.1", 2, http, grpc)
    ports = [port for pair in pairs for port in (pair.http, pair.grpc)]
    assert len(set(ports)) == 4
    assert 0 not in ports
    assert not http or pairs[1].http == 8001
