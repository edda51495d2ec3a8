"""The hub of a group: a rank is who is connected now, and what a rank says wrong ends its own connection."""

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data_parallel import group_hub as hub
from tokenloom.engine_core.data_parallel.group_address import connect, listen
from tokenloom.engine_core.data_parallel.group_hub import GroupHub, open_meeting
from tokenloom.engine_core.data_parallel.group_link import GroupLink
from tokenloom.engine_core.data_parallel.messages import (
    Accepted,
    Called,
    Ended,
    Frames,
    GroupHello,
    Lost,
    Newcomers,
    Outcome,
    ToRank,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
    decoder_of,
)

GROUP = "experts"


class Rank:
    """A rank's end of its connection."""

    def __init__(self, address: str, rank: int, facts: dict[str, str] | None = None) -> None:
        self._connection = connect(address)
        self._connection.settimeout(30)
        self._frames: Frames[ToRank] = Frames(self._connection, decoder_of(ToRank))
        self.send(GroupHello(GROUP, rank, facts or {}))
        self.expect(Accepted())

    def send(self, message: object) -> None:
        self._frames.send(message)

    def expect(self, *messages: ToRank) -> None:
        assert [self._frames.receive() for _ in messages] == list(messages)

    def vote(self, wave: int, target: int, want: Want = Want.IDLE) -> None:
        self.send(Vote(wave, 0, want, target))

    def expect_end(self) -> None:
        with pytest.raises(ConnectionError):
            self._frames.receive()

    def leave(self) -> None:
        """End the connection, and wait until the hub has taken note of it."""
        self._connection.shutdown(socket.SHUT_WR)
        self.expect_end()

    def close(self) -> None:
        self._frames.close()


@pytest.fixture
def address(socket_dir: Path) -> Iterator[str]:
    address = f"unix:{socket_dir}/group.sock"
    hub = GroupHub(address, GroupHello(GROUP, 0, {}), 2)
    yield address
    hub.close()


Ranks = tuple[Rank, Rank, Rank]


@pytest.fixture
def ranks(address: str) -> Iterator[Ranks]:
    """Rank 0, a rank 1 that was removed and has not left yet, and its successor, which waits."""
    zero, old = Rank(address, 0), Rank(address, 1)
    for member in (zero, old):
        member.expect(Welcome(0, 0, runs=False, size=2))
    zero.vote(0, target=1)
    old.expect(Called(0))
    old.vote(0, target=1)
    outcome = Outcome(0, 0, VoteVerdict.REST, 1)
    zero.expect(outcome)
    old.expect(outcome)
    new = Rank(address, 1)
    zero.expect(Newcomers([1]))
    yield zero, old, new
    for rank in (zero, old, new):
        rank.close()


def grow(zero: Rank, new: Rank) -> None:
    zero.vote(1, target=2)
    zero.expect(Outcome(1, 0, VoteVerdict.REST, 2))
    new.expect(Welcome(2, 0, runs=False, size=2))


def compute(zero: Rank, new: Rank) -> None:
    zero.vote(2, target=2, want=Want.RUN)
    new.expect(Called(2))
    new.vote(2, target=2)
    for rank in (zero, new):
        rank.expect(Outcome(2, 0, VoteVerdict.RUN, 2))


def test_the_end_of_a_removed_rank_does_not_make_its_successor_forgotten(ranks: Ranks) -> None:
    zero, old, new = ranks
    old.leave()
    grow(zero, new)
    compute(zero, new)


def test_the_end_of_a_removed_rank_is_no_loss_of_its_successor(ranks: Ranks) -> None:
    zero, old, new = ranks
    grow(zero, new)
    old.leave()
    compute(zero, new)


def test_a_vote_of_a_removed_rank_is_not_that_of_its_successor(ranks: Ranks) -> None:
    zero, old, new = ranks
    grow(zero, new)
    old.vote(2, target=2, want=Want.RUN)
    old.expect_end()
    compute(zero, new)


def test_a_vote_of_a_newcomer_ends_its_connection_and_not_the_group(ranks: Ranks, address: str) -> None:
    zero, _, new = ranks
    new.vote(1, target=1)
    new.expect_end()
    another = Rank(address, 1)
    zero.expect(Newcomers([1]))
    grow(zero, another)
    another.close()


def test_a_rank_that_votes_on_another_step_is_lost_to_the_others(ranks: Ranks) -> None:
    zero, _, new = ranks
    grow(zero, new)
    zero.send(Vote(2, 0, Want.RUN, 2))
    new.expect(Called(2))
    new.send(Vote(2, 32, Want.RUN, 2))
    new.expect_end()
    zero.expect(Lost(3, 2))


def test_a_hub_that_ends_says_so(address: str) -> None:
    own = f"{address}-other"
    hub = GroupHub(own, GroupHello(GROUP, 0, {}), 1)
    zero = Rank(own, 0)
    zero.expect(Welcome(0, 0, runs=False, size=1))
    hub.close()
    zero.expect(Ended())
    zero.expect_end()
    zero.close()


@pytest.mark.parametrize(
    "message",
    [
        Vote(2, 0, Want.IDLE, 2**63),
        Vote(2, 0, Want.IDLE, 0),
        Vote(-1, 0, Want.IDLE, 2),
        Vote(2, -1, Want.IDLE, 2),
        GroupHello(GROUP, 1, {}),
    ],
)
def test_what_a_member_may_not_say_ends_its_connection(ranks: Ranks, message: object) -> None:
    zero, _, new = ranks
    grow(zero, new)
    new.send(message)
    new.expect_end()
    zero.expect(Lost(3, 2))


@pytest.mark.parametrize("rank", [-1, 2**16, 2**63])
def test_a_rank_that_no_group_has_is_hung_up_on(ranks: Ranks, address: str, rank: int) -> None:
    with connect(address) as connection:
        connection.settimeout(30)
        frames: Frames[ToRank] = Frames(connection, decoder_of(ToRank))
        frames.send(GroupHello(GROUP, rank, {}))
        with pytest.raises(ConnectionError):
            frames.receive()
    grow(ranks[0], ranks[2])


def test_a_hub_without_a_thread_for_a_rank_takes_the_next(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _without_threads)
        with connect(address) as connection:
            connection.settimeout(30)
            assert connection.recv(1) == b""
    Rank(address, 0).close()
    assert "group experts cannot take a connection: can't start new thread" in caplog.text


def test_a_hub_without_descriptors_takes_a_rank_when_it_has_some(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners: list[Exhausted] = []

    def exhausted(address: str) -> Exhausted:
        listeners.append(Exhausted(listen(address)))
        return listeners[0]

    monkeypatch.setattr(hub, "listen", exhausted)
    address = f"unix:{socket_dir}/group.sock"
    group = GroupHub(address, GroupHello(GROUP, 0, {}), 2)
    Rank(address, 0).close()
    group.close()
    assert not listeners[0].errors


class Exhausted:
    """A listener that first fails as one does without descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self.errors = [OSError(errno.EMFILE, "Too many open files")]
        self._listener = listener

    def accept(self) -> tuple[socket.socket, object]:
        if self.errors:
            raise self.errors.pop()
        return self._listener.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._listener, name)


def _without_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_hub_that_was_started_before_its_ranks_takes_the_facts_of_the_first(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/early.sock"
    hub = GroupHub(address, GroupHello(GROUP, 0, {}), 2, takes_facts=True)
    links = [GroupLink(address, GroupHello(GROUP, 1, {"model": "a"}), 2, timeout=30, has_hub_elsewhere=True)]
    try:
        with pytest.raises(ValueError, match="model is 'b' on rank 0 and 'a' on rank 1 of group"):
            GroupLink(address, GroupHello(GROUP, 0, {"model": "b"}), 2, timeout=30, has_hub_elsewhere=True)
        links.append(GroupLink(address, GroupHello(GROUP, 0, {"model": "a"}), 2, timeout=30, has_hub_elsewhere=True))
    finally:
        for link in links:
            link.close()
        hub.close()


def test_facts_of_a_rank_that_has_left_bind_nobody(socket_dir: Path) -> None:
    address = f"unix:{socket_dir}/early.sock"
    hub = GroupHub(address, GroupHello(GROUP, 0, {}), 2, takes_facts=True)
    links: list[GroupLink] = []
    try:
        wrong = Rank(address, 1, {"model": "a"})
        with pytest.raises(OSError, match="rank 1 of the group has joined already"):
            GroupLink(address, GroupHello(GROUP, 1, {"model": "b"}), 2, timeout=0, has_hub_elsewhere=True)
        wrong.leave()
        wrong.close()
        for rank in (0, 1):
            links.append(GroupLink(address, GroupHello(GROUP, rank, {"model": "b"}), 2, 30, has_hub_elsewhere=True))
        with pytest.raises(ValueError, match="model is 'a' on rank 2 and 'b' on rank 0 of group"):
            GroupLink(address, GroupHello(GROUP, 2, {"model": "a"}), 2, timeout=30, has_hub_elsewhere=True)
    finally:
        for link in links:
            link.close()
        hub.close()


def test_a_group_meets_elsewhere_once_another_program_has_its_port(socket_dir: Path) -> None:
    config = ParallelConfig(
        data_parallel_group="g",
        data_parallel_size=2,
        data_parallel_rank=0,
        data_parallel_address=f"unix:{socket_dir}/g",
    )
    first, hub = open_meeting(config, "127.0.0.1")
    assert hub is not None
    hub.close()
    again, hub = open_meeting(config, "127.0.0.1")
    assert hub is not None
    assert again == first, "ranks that have lost rank 0 find it again"
    hub.close()
    with listen(first.address):
        other, hub = open_meeting(config, "127.0.0.1")
    assert hub is not None
    assert other.address != first.address
    assert open_meeting(msgspec.structs.replace(config, data_parallel_rank=1), "127.0.0.1") == (other, None)
    hub.close()
    with listen("127.0.0.1:0") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="in use"):
            open_meeting(msgspec.structs.replace(config, data_parallel_address=address), "127.0.0.1")
