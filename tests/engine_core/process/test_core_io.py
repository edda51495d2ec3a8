"""What a core sends to its client, and when it waits."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tokenloom.engine_core.data.errors import EngineDamagedError, EngineDeadError
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreOutputs
from tokenloom.engine_core.process.core_io import ENGINE_CORE_DEAD, OutputSocket, death_of
from tokenloom.engine_core.wire.frames import Decoder, FrameReceiver


@pytest.fixture
def sockets() -> Iterator[tuple[OutputSocket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield OutputSocket(near), far


def test_a_client_that_is_gone_does_not_fail_the_core(sockets: tuple[OutputSocket, socket.socket]) -> None:
    output, far = sockets
    far.close()
    output.send(EngineCoreOutputs(step=1))
    output.send_dead()


def test_the_last_message_says_that_the_core_has_failed(sockets: tuple[OutputSocket, socket.socket]) -> None:
    output, far = sockets
    output.send_dead()
    frames = FrameReceiver(far).receive()
    assert frames == [ENGINE_CORE_DEAD]
    assert type(death_of(frames)) is EngineDeadError


def test_the_last_message_says_that_weights_are_damaged(sockets: tuple[OutputSocket, socket.socket]) -> None:
    output, far = sockets
    output.send_dead("worker 0: bytes 0 to 7 of model.ä have changed")
    error = death_of(FrameReceiver(far).receive())
    assert type(error) is EngineDamagedError
    assert str(error) == "worker 0: bytes 0 to 7 of model.ä have changed"


def test_a_client_that_does_not_read_stops_the_core(sockets: tuple[OutputSocket, socket.socket]) -> None:
    output, far = sockets
    step, num_sent = EngineCoreOutputs(outputs=[EngineCoreOutput("a", list(range(1 << 17)))]), 0

    def send() -> None:
        nonlocal num_sent
        for _ in range(100):
            output.send(step)
            num_sent += 1

    thread = threading.Thread(target=send)
    thread.start()
    receiver, decoder = FrameReceiver(far), Decoder(EngineCoreOutputs)
    assert decoder.decode(receiver.receive()) == step
    assert num_sent < 99
    for _ in range(99):
        assert decoder.decode(receiver.receive()) == step
    thread.join()
    assert num_sent == 100
