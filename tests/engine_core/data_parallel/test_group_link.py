"""A rank says hello to the hub of its group, and gives up in time."""

import queue
import socket
import threading
from pathlib import Path

import pytest

from tokenloom.engine_core.data_parallel import group_hub as hub
from tokenloom.engine_core.data_parallel.group_address import connect, listen
from tokenloom.engine_core.data_parallel.group_hub import GroupHub
from tokenloom.engine_core.data_parallel.group_link import GroupLink
from tokenloom.engine_core.data_parallel.messages import (
    Accepted,
    Frames,
    GroupHello,
    Lost,
    Newcomers,
    Refused,
    ToHub,
    ToRank,
    Welcome,
    decoder_of,
)

HELLO = GroupHello("experts", 1, {})


@pytest.fixture
def address(socket_dir: Path) -> str:
    return f"unix:{socket_dir}/group.sock"


def test_a_hub_that_never_answers_is_not_waited_for(address: str) -> None:
    with listen(address), pytest.raises(OSError, match=r"no data-parallel group at .*timed out"):
        GroupLink(address, HELLO, 2, timeout=0.05)


def test_a_refusal_for_good_is_not_tried_again(address: str) -> None:
    with listen(address) as listener:
        answering = threading.Thread(target=refuse, args=(listener,))
        answering.start()
        with pytest.raises(ValueError, match="another model"):
            GroupLink(address, HELLO, 2, timeout=30)
        answering.join()


def refuse(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    frames: Frames[ToHub] = Frames(connection, decoder_of(ToHub))
    assert frames.receive() == HELLO
    frames.send(Refused("another model", permanent=True))
    frames.close()


def test_a_connection_that_says_nothing_is_closed(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SEND_SECONDS", 1)
    served = GroupHub(address, GroupHello("experts", 0, {}), 2)
    with connect(address) as silent:
        silent.settimeout(30)
        assert silent.recv(1) == b"", "the hub has ended the connection"
    served.close()


def test_a_rank_leaves_its_group_while_its_workers_are_started_again(address: str) -> None:
    hellos = [GroupHello("experts", rank, {}, workers=[f"127.0.0.1:{rank}"]) for rank in range(2)]
    links = [GroupLink(address, hello, 2, timeout=30) for hello in hellos]
    messages: queue.Queue[ToRank] = queue.Queue()
    links[0].start(lambda message, _: messages.put(message), lambda _: None)
    links[1].start(lambda *_: None, lambda _: None)
    assert isinstance(messages.get(timeout=30), Welcome)
    links[1].step_back()
    lost = messages.get(timeout=30)
    assert isinstance(lost, Lost), lost
    assert lost.roster is not None
    assert lost.roster.ranks == [0]
    links[1].come_again(["127.0.0.1:7"])
    assert messages.get(timeout=30) == Newcomers([1])
    for link in reversed(links):
        link.close()


def test_a_rank_that_has_stepped_back_may_end(address: str) -> None:
    links = [GroupLink(address, GroupHello("experts", rank, {}), 2, timeout=30) for rank in range(2)]
    ended = threading.Event()
    links[1].start(lambda *_: None, lambda is_final: ended.set() if is_final else None)
    links[1].step_back()
    (reader,) = [thread for thread in threading.enumerate() if thread.name == "group-link"]
    links[1].close()
    reader.join(30)
    assert not reader.is_alive()
    assert not ended.is_set(), "it has left as it was asked to"
    links[0].close()


def test_a_rank_that_ends_while_it_joins_again_is_no_member(address: str) -> None:
    """The others waited for its votes for as long as its process ran."""
    ended = threading.Event()
    with listen(address) as listener:
        listener.settimeout(30)
        made = queue.Queue[GroupLink]()
        threading.Thread(target=lambda: made.put(GroupLink(address, HELLO, 2, timeout=30)), daemon=True).start()
        first = greeted(listener)
        first.send(Accepted())
        link = made.get(timeout=30)
        link.start(lambda *_: None, lambda is_for_good: ended.set() if is_for_good else None)
        first.close()
        second = greeted(listener)
        link.close()
        second.send(Accepted())
        second.limit(10)
        with pytest.raises(ConnectionError):
            second.receive()
        second.close()
    assert not ended.is_set(), "it was asked to leave"


def greeted(listener: socket.socket) -> Frames[ToHub]:
    """Return the next connection, over which a rank has said hello."""
    connection, _ = listener.accept()
    frames: Frames[ToHub] = Frames(connection, decoder_of(ToHub))
    assert isinstance(frames.receive(), GroupHello)
    return frames


def test_strangers_that_say_nothing_keep_no_thread_each(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_SEND_SECONDS", 120)  # longer than it takes to be hung up on at once
    first = GroupLink(address, GroupHello("experts", 0, {}), 2, timeout=30)
    strangers = [connect(address) for _ in range(hub._MOST_UNKNOWN + 20)]
    for each in strangers[hub._MOST_UNKNOWN :]:
        each.settimeout(30)
        assert each.recv(1) == b"", "it is hung up on at once"
    assert sum(thread.name == "group-rank" for thread in threading.enumerate()) <= hub._MOST_UNKNOWN + 1
    for each in strangers:
        each.close()
    GroupLink(address, HELLO, 2, timeout=30).close()
    first.close()
