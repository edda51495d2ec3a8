"""The kernel gathers what numpy gathers."""

import shutil
from dataclasses import fields

import numpy as np
import pytest

from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch import input_batch
from tokenloom.gpu_worker.batch.input_batch import InputBatch, StepInputs

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

PARAMS = CoreSamplingParams(max_tokens=50, seed=0)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[InputBatch]:
    """One with the kernel and one with numpy."""
    with_kernel = InputBatch(8, 1024, 16)
    monkeypatch.setattr(input_batch, "make_gatherer", lambda *_: None)
    return [with_kernel, InputBatch(8, 1024, 16)]


def assert_equal(found: StepInputs, expected: StepInputs) -> None:
    for field in fields(StepInputs):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(one, other)
        assert not isinstance(other, np.ndarray) or one.dtype == other.dtype


def begin(batch: InputBatch, lengths: dict[str, int], blocks: dict[str, list[int]]) -> None:
    new = [NewRequestData(each, list(range(n)), [], PARAMS, blocks[each], 0) for each, n in lengths.items()]
    batch.update(SchedulerOutput(new, CachedRequestData([], [], [], {}), lengths, sum(lengths.values()), [], []))


def test_prompts_chunks_decodes_and_drafts(batches: list[InputBatch]) -> None:
    lengths = {"a": 40, "b": 3, "c": 600}
    blocks = {"a": [5, 3, 8], "b": [1], "c": list(range(100, 140))}
    random = np.random.default_rng(0)
    for batch in batches:
        begin(batch, lengths, blocks)
    steps = [lengths, {"c": 17}, {"a": 1}, {"b": 1, "a": 1}, {"a": 4, "b": 1}, {"a": 1, "b": 1, "c": 300}]
    for number, counts in enumerate(steps):
        drafts = {"a": [7, 8, 9]} if counts.get("a") == 4 else {}
        computed = random.integers(0, 30, len(counts)).tolist() if number else [0] * len(counts)
        computed = [min(done, lengths[each] - 1) for each, done in zip(counts, computed, strict=True)]
        for batch in batches:
            batch.update(
                SchedulerOutput(
                    [], CachedRequestData(list(counts), [[]] * len(counts), computed, {}), counts, 1, [], []
                )
            )
        assert_equal(*(batch.prepare(counts, drafts) for batch in batches))


def test_a_row_that_another_request_takes(batches: list[InputBatch]) -> None:
    for batch in batches:
        begin(batch, {"a": 20, "b": 5}, {"a": [2, 9], "b": [4]})
        batch.prepare({"a": 1, "b": 1})
        batch.update(SchedulerOutput([], CachedRequestData([], [], [], {}), {}, 0, ["a"], []))
        begin(batch, {"a": 7}, {"a": [6]})
    found, expected = (batch.prepare({"a": 7, "b": 5}) for batch in batches)
    assert_equal(found, expected)
    assert found.block_tables.tolist() == [[6], [4]]


def test_decodes_that_go_on_keep_their_arrays(batches: list[InputBatch]) -> None:
    """Until their requests or shapes change. They lie where recorded kernels read them."""
    batch = batches[0]
    begin(batch, {"a": 20, "b": 5}, {"a": [2, 9], "b": [4]})
    batch.prepare({"a": 20, "b": 5})
    for row in range(2):
        batch.append(np.array([row]), np.array([3]))

    def decode(computed: list[int], counts: dict[str, int], new_blocks: list[list[int]] | None = None) -> StepInputs:
        cached = CachedRequestData(list(counts), new_blocks or [[]] * len(counts), computed, {})
        batch.update(SchedulerOutput([], cached, counts, len(counts), [], []))
        return batch.prepare(counts, {"a": [7]} if counts["a"] > 1 else {})

    first = decode([20, 5], {"a": 1, "b": 1})
    arrays = batch.gathered
    assert arrays is not None
    assert first.seq_lens.base is arrays.seq_lens
    assert first.token_ids.base is arrays.token_ids
    assert decode([20, 5], {"a": 1, "b": 1}) is first
    wider = decode([20, 5], {"a": 1, "b": 1}, [[], [7, 8]])
    assert wider is not first
    assert wider.block_tables.tolist() == [[2, 9, 0], [4, 7, 8]]
    drafted = decode([20, 5], {"a": 2, "b": 1})
    assert (drafted.drafts, drafted.token_ids.tolist()) == ({"a": [7]}, [3, 7, 3])
    again = decode([20, 5], {"a": 1, "b": 1})
    assert (again.drafts, again.token_ids.tolist()) == ({}, [3, 3])
    assert decode([5, 20], {"b": 1, "a": 1}).seq_lens.tolist() == [6, 21]


BAD_STEPS = {
    "a negative chunk": ({"a": -11, "b": 1}, [0, 0]),
    "no tokens": ({"a": 0, "b": 1}, [0, 0]),
    "counts whose sum is that of decodes": ({"a": 3, "b": -1}, [0, 0]),
    "more tokens than blocks": ({"a": 49, "b": 1}, [0, 0]),
    "one token behind the last block": ({"a": 1, "b": 1}, [48, 0]),
    "a negative position": ({"a": 1, "b": 1}, [-1, 0]),
    "a position beyond 32 bits": ({"a": 1, "b": 1}, [1 << 32, 0]),
    "a position whose end is beyond 64 bits": ({"a": 1, "b": 1}, [(1 << 63) - 1, 0]),
    "a count beyond 32 bits": ({"a": 1, "b": (1 << 32) + 1}, [0, 0]),
}


@pytest.mark.parametrize("bad", BAD_STEPS)
def test_a_step_of_tokens_that_are_not_there_is_refused(batches: list[InputBatch], bad: str) -> None:
    """Nothing is read or written beyond the arrays, and the next step is as ever."""
    counts, computed = BAD_STEPS[bad]
    for batch in batches:
        begin(batch, {"a": 40, "b": 3}, {"a": [5, 3, 8], "b": [1]})
        cached = CachedRequestData(list(counts), [[], []], computed, {})
        batch.update(SchedulerOutput([], cached, counts, 2, [], []))
        with pytest.raises((AssertionError, MemoryError), match=r"tokens from position|allocate"):
            batch.prepare(counts)
        cached = CachedRequestData(["a", "b"], [[], []], [39, 2], {})
        batch.update(SchedulerOutput([], cached, {"a": 1, "b": 1}, 2, [], []))
        assert batch.prepare({"a": 1, "b": 1}).slot_mapping.tolist() == [8 * 16 + 7, 18]


def test_a_block_that_the_cache_does_not_have_is_refused() -> None:
    for blocks in ([3, 10], [-1, 3]):
        with pytest.raises(AssertionError, match="no blocks of the cache"):
            begin(InputBatch(2, 64, 16, num_blocks=10), {"a": 20}, {"a": blocks})
    batch = InputBatch(2, 64, 16, num_blocks=10)
    begin(batch, {"a": 16}, {"a": [10]})
    with pytest.raises(AssertionError, match="the cache 10 blocks"):
        batch.prepare({"a": 16})


def test_more_requests_than_rows_are_refused() -> None:
    batch = InputBatch(2, 64, 16)
    begin(batch, {"a": 1}, {"a": [1]})
    assert batch._gatherer is not None
    batch._gatherer._args.most_requests = 0
    with pytest.raises(AssertionError, match="of which 0 fit"):
        batch.prepare({"a": 1})
