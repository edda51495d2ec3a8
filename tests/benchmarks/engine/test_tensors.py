import socket

import numpy as np
import pytest

from benchmarks.engine import tensors
from tokenloom.engine_core.wire.array_arena import ArrayArena
from tokenloom.engine_core.wire.frames import FrameSender


def test_every_size_goes_both_ways() -> None:
    results = tensors.measure([1, 64], rounds=2)
    assert [(result.kib, result.way) for result in results] == [(kib, way) for kib in (1, 64) for way in tensors.WAYS]
    assert all(0 < result.held_ms < result.ms for result in results)


def test_a_wrong_sum_ends_the_benchmark() -> None:
    near, far = socket.socketpair()
    with near, far:
        FrameSender(far).send_frames([b"1.5"])
        arena = ArrayArena(1 << 20, min_bytes=0)
        with pytest.raises(SystemExit, match="arrived wrong"):
            tensors._send(near, np.ones(500, np.float32), arena)
        arena.close()
