"""A rank says hello to the hub of its group, and gives up in time."""

import socket
import threading
from pathlib import Path

import pytest

from tokenloom.engine_core.data_parallel.frames import Frames, decoder_of
from tokenloom.engine_core.data_parallel.group_address import listen
from tokenloom.engine_core.data_parallel.group_link import GroupLink
from tokenloom.engine_core.data_parallel.messages import GroupHello, Refused, ToHub

HELLO = GroupHello("experts", 1, {})


@pytest.fixture
def address(socket_dir: Path) -> str:
    return f"unix:{socket_dir}/group.sock"


def test_a_hub_that_never_answers_is_not_waited_for(address: str) -> None:
    with listen(address), pytest.raises(OSError, match=r"no data-parallel group at .*timed out"):
        GroupLink(address, HELLO, 2, timeout=0.05)


def test_a_refusal_for_good_is_not_tried_again(address: str) -> None:
    with listen(address) as listener:
        hub = threading.Thread(target=refuse, args=(listener,))
        hub.start()
        with pytest.raises(ValueError, match="another model"):
            GroupLink(address, HELLO, 2, timeout=30)
        hub.join()


def refuse(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    frames: Frames[ToHub] = Frames(connection, decoder_of(ToHub))
    assert frames.receive() == HELLO
    frames.send(Refused("another model", permanent=True))
    frames.close()
