from dataclasses import replace

import pytest

from benchmarks import kv


def test_every_way_moves_the_right_bytes_and_is_compared() -> None:
    shape = replace(kv.SHAPES[1], pool_bytes=4 << 20)
    ways = ["shm", "socket (unix)", "socket (tcp)", "offload"]
    results = kv.measure(shape, ways, seconds=0.01)
    assert [result.way for result in results] == [kv.BASELINE, *ways]
    assert results[0].share == 1.0
    assert all(result.gib_per_second > 0 and result.ms > 0 for result in results)


def test_wrong_bytes_end_the_benchmark() -> None:
    shape = replace(kv.SHAPES[1], pool_bytes=4 << 20)
    with pytest.raises(SystemExit, match="shm moved wrong bytes"):
        kv._check(shape, shape.make_pool(shared=False), "shm", lambda: None)
