"""What a device that keeps rows has to learn."""

from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch.input_batch import InputBatch


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
