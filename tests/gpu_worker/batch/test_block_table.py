import numpy as np

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch.batch_arrays import BlockTable
from tokenloom.gpu_worker.batch.input_batch import InputBatch


def rows(*values):
    return np.array(values, dtype=np.int64)


def test_slots_follow_the_blocks():
    table = BlockTable(max_num_seqs=4, max_model_len=20, block_size=4)
    table.append(2, [7, 3])
    table.append(2, [])
    table.append(2, [5])
    table.append(0, [1])
    slots = table.slots(rows(2, 2, 2, 2, 0), rows(0, 3, 4, 11, 2))
    assert slots.tolist() == [28, 31, 12, 23, 6]


def test_gather_is_as_wide_as_the_longest():
    table = BlockTable(max_num_seqs=4, max_model_len=20, block_size=4)
    table.append(0, [1])
    table.append(1, [2, 3, 4])
    assert table.gather(rows(0)).tolist() == [[1]]
    assert table.gather(rows(1, 0)).shape == (2, 3)
    assert table.gather(rows(1, 0))[:, 0].tolist() == [2, 1]


def test_a_replaced_row_forgets_its_blocks():
    table = BlockTable(max_num_seqs=1, max_model_len=16, block_size=4)
    table.append(0, [9, 8, 7])
    table.replace(0, [4])
    table.append(0, [5])
    assert table.gather(rows(0)).tolist() == [[4, 5]]


def test_the_last_position_of_a_context_that_is_no_multiple_of_the_block_has_a_slot():
    table = BlockTable(max_num_seqs=1, max_model_len=9, block_size=4)
    table.append(0, [0, 1, 2])
    assert table.slots(rows(0), rows(8)).tolist() == [8]


def test_each_group_of_layers_has_slots_of_its_own():
    table = BlockTable(max_num_seqs=2, max_model_len=8, block_size=4, num_groups=2)
    table.append(1, [3, 5])
    table.append(1, [4, 6])
    assert table.gather(rows(1)).tolist() == [[3, 5, 4, 6]]
    assert table.slots(rows(1, 1), rows(1, 6)).tolist() == [[13, 18], [21, 26]]


def test_each_change_is_taken_once_and_the_latest_counts():
    batch = InputBatch(2, 64, 16, num_groups=2)
    changes = batch.watch()
    params = CoreSamplingParams(max_tokens=9, seed=1)
    new = NewRequestData("a", [1, 2], [], params, [5, 6], 0)
    batch.update(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 2}, 2, [], []))
    batch.update(SchedulerOutput([], CachedRequestData(["a"], [[7, 8]], [2], {}), {"a": 1}, 1, [], []))
    again = NewRequestData("b", [1], [], params, [9, 10], 0)
    batch.update(SchedulerOutput([again], CachedRequestData([], [], [], {}), {"b": 1}, 1, ["a"], []))
    (row,) = changes.take_rows()
    assert batch.has_row(row)
    assert batch.params_of(row) is params
    places, block_ids = changes.take_blocks()
    width = batch.block_table.block_ids.shape[1]
    assert dict(zip((places - row * width).tolist(), block_ids.tolist(), strict=True)) == {0: 9, 1: 10, 2: 7, 3: 8}
    assert not changes.take_rows()
    assert not len(changes.take_blocks()[0])


def test_without_a_device_nothing_is_collected():
    assert InputBatch(2, 64, 16).block_table.changes is None
