from dataclasses import replace

import pytest

from benchmarks.kv import kv_transfer
from benchmarks.kv.kv_shape import SHAPES


def test_every_way_moves_the_right_bytes_and_is_compared() -> None:
    shape = replace(SHAPES[1], pool_bytes=4 << 20)
    ways = ["shm", "socket (unix)", "socket (tcp)", "offload"]
    results = kv_transfer.measure(shape, ways, seconds=0.01)
    assert [result.way for result in results] == [kv_transfer.BASELINE, *ways]
    assert results[0].share == 1.0
    assert all(result.gib_per_second > 0 and result.ms > 0 for result in results)


def test_a_run_over_all_shapes_has_a_table_for_each() -> None:
    rounds: list[None] = []
    report = kv_transfer.run(["shm"], 8 << 20, 0.01, lambda: rounds.append(None))
    assert len(kv_transfer.tables(report)) == len(rounds) == len(SHAPES)
    assert {result["way"] for result in report["results"]} == {kv_transfer.BASELINE, "shm"}
    assert [table.row_count for table in kv_transfer.tables(report)] == [2] * len(SHAPES)


def test_wrong_bytes_end_the_benchmark() -> None:
    shape = replace(SHAPES[1], pool_bytes=4 << 20)
    with pytest.raises(SystemExit, match="shm moved wrong bytes"):
        kv_transfer._check(shape, shape.make_pool(shared=False), "shm", lambda: None)
