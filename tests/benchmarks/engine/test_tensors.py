import numpy as np
import pytest
import zmq

from benchmarks.engine import tensors
from tokenloom.engine_core.wire.array_arena import ArrayArena
from tokenloom.engine_core.wire.frames import FrameSender


def test_every_size_goes_both_ways() -> None:
    results = tensors.measure([1, 64], rounds=2)
    assert [(result.kib, result.way) for result in results] == [(kib, way) for kib in (1, 64) for way in tensors.WAYS]
    assert all(0 < result.held_ms < result.ms for result in results)


def test_a_wrong_sum_ends_the_benchmark() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket, context.socket(zmq.PAIR) as other:
        socket.bind("inproc://tensors")
        other.connect("inproc://tensors")
        other.send(b"1.5")
        arena = ArrayArena(1 << 20, min_bytes=0)
        with pytest.raises(SystemExit, match="arrived wrong"):
            tensors._send(socket, FrameSender(socket), np.ones(500, np.float32), arena)
        arena.close()
