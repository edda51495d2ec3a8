"""Connections are bounded, and idle ones make room for new ones."""

import logging
import math

import pytest

from tokenloom.services.gateway.http.server.connections import Connections


class FakeConnection:
    def __init__(self, *, is_idle: bool = False) -> None:
        self.idle_seconds: float | None = math.inf if is_idle else None
        self.is_closed = False

    def close_idle(self) -> None:
        self.is_closed = True


def admitted(connections: Connections, peer: str, count: int, *, is_idle: bool = False) -> list[FakeConnection]:
    made = [FakeConnection(is_idle=is_idle) for _ in range(count)]
    assert all(connections.admit(each, peer) for each in made)
    return made


def test_an_idle_connection_makes_room_and_the_oldest_goes_first() -> None:
    connections = Connections(4, 4)
    busy = admitted(connections, "a", 2)
    idle = admitted(connections, "b", 2, is_idle=True)
    assert connections.admit(FakeConnection(), "c")
    assert [each.is_closed for each in busy + idle] == [False, False, True, False]
    assert len(connections) == 4


def test_a_connection_between_two_requests_is_kept() -> None:
    connections = Connections(2, 2)
    active, idle = admitted(connections, "a", 2)
    active.idle_seconds, idle.idle_seconds = 0.5, 1.5
    assert connections.admit(FakeConnection(), "b")
    assert not connections.admit(FakeConnection(), "b")
    assert [active.is_closed, idle.is_closed] == [False, True]


def test_without_an_idle_connection_a_new_one_is_refused() -> None:
    connections = Connections(3, 3)
    busy = admitted(connections, "a", 3)
    assert not connections.admit(FakeConnection(), "b")
    connections.remove(busy[0])
    assert connections.admit(FakeConnection(), "b")
    assert not any(each.is_closed for each in busy)


def test_one_address_takes_no_room_from_others() -> None:
    connections = Connections(100, 3)
    admitted(connections, "a", 3)
    neighbour = admitted(connections, "b", 1, is_idle=True)[0]
    assert not connections.admit(FakeConnection(), "a")
    assert connections.admit(FakeConnection(), "b")
    assert not neighbour.is_closed


def test_an_address_at_its_limit_loses_its_own_idle_connection() -> None:
    connections = Connections(100, 2)
    idle = admitted(connections, "a", 2, is_idle=True)
    assert connections.admit(FakeConnection(), "a")
    assert [each.is_closed for each in idle] == [True, False]


def test_unix_sockets_have_no_address() -> None:
    connections = Connections(10, 1)
    admitted(connections, "", 10)
    assert not connections.admit(FakeConnection(), "")


def test_few_connections_are_looked_at() -> None:
    looks = 0

    class Counting:
        @property
        def idle_seconds(self) -> None:
            nonlocal looks
            looks += 1

        def close_idle(self) -> None:
            raise AssertionError

    connections = Connections(10_000, 10_000)
    for _ in range(10_000):
        assert connections.admit(Counting(), "a")
    assert not connections.admit(Counting(), "b")
    assert looks <= 32


def test_an_idle_connection_is_found_behind_many_busy_ones() -> None:
    connections = Connections(200, 200)
    admitted(connections, "a", 199)
    idle = admitted(connections, "a", 1, is_idle=True)[0]
    outcomes = [connections.admit(FakeConnection(), "b") for _ in range(10)]
    assert outcomes.count(True) == 1
    assert idle.is_closed


def test_nothing_is_kept_of_closed_connections() -> None:
    connections = Connections(10, 10)
    for connection in admitted(connections, "a", 5):
        connections.remove(connection)
        connections.remove(connection)
    assert len(connections) == 0
    assert not connections._of_peer


def test_refusals_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    connections = Connections(1, 1)
    admitted(connections, "a", 1)
    for _ in range(1000):
        assert not connections.admit(FakeConnection(), "b")
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
