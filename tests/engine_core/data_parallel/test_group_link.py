"""A rank says hello to the hub of its group, and gives up in time."""

import socket
import threading
from pathlib import Path

import pytest

from tokenloom.engine_core.data_parallel import group_link as hub
from tokenloom.engine_core.data_parallel.group_address import connect, listen
from tokenloom.engine_core.data_parallel.group_link import GroupHub, GroupLink
from tokenloom.engine_core.data_parallel.messages import Frames, GroupHello, Refused, ToHub, decoder_of

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
