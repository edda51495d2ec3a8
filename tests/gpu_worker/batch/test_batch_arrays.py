"""The kernel gathers what numpy gathers."""

import shutil
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.gpu_worker.sampler.host.variants import VARIANTS, params, peaked
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.batch import input_batch
from tokenloom.gpu_worker.batch.batch_arrays import KernelSampler, StepRows
from tokenloom.gpu_worker.batch.input_batch import InputBatch, StepInputs
from tokenloom.gpu_worker.kernels.threads import set_kernel_threads
from tokenloom.gpu_worker.sampler.host.sampler import Sampler

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


GREEDY = params(temperature=0.0)
ROWS = {"a": 4, "b": 1, "c": 3}


class Rows:
    """Six rows with room for eight tokens, of which row n knows n and one of them is the prompt."""

    def __init__(self, wanted: Sequence[CoreSamplingParams] = (GREEDY,) * 3) -> None:
        self.tokens = np.zeros((6, 8), dtype=np.int32)
        self.known, self.prompts = np.arange(6), np.ones(6, dtype=np.int64)
        self._drawer = KernelSampler(self.tokens, self.known, self.prompts)
        self._step_rows = StepRows.find(list(ROWS), ROWS, dict(zip(ROWS.values(), wanted, strict=True)))

    def append(self, logits: torch.Tensor, places: Sequence[int] = (0, 1, 2)) -> list[int] | None:
        found = self._drawer.append(self._step_rows, np.array(places), logits)
        return None if found is None else found.tolist()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [1, 7, 64, 1023, 1024, 1025, 20_011])
def test_the_first_of_the_largest_logits(vocab: int, threads: int) -> None:
    """Rounded, so that many are equal."""
    random = np.random.default_rng(vocab)
    set_kernel_threads(threads)
    try:
        for _ in range(5):
            rows = Rows()
            logits = np.round(random.standard_normal((3, vocab)) - 3.0, 1).astype(np.float32)
            expected = logits.argmax(axis=1).tolist()
            assert rows.append(torch.from_numpy(logits)) == expected
            assert rows.tokens[[4, 1, 3], [4, 1, 3]].tolist() == expected
            assert rows.known.tolist() == [0, 2, 2, 4, 5, 5]
    finally:
        set_kernel_threads(0)


@pytest.mark.parametrize("vocab", [2, 63, 100, 1000, 5000, 40_011])
@pytest.mark.parametrize("name", VARIANTS)
def test_random_rows_draw_what_numpy_draws(name: str, vocab: int) -> None:
    """Beside a greedy row, with many seeds and output indices."""
    random = np.random.default_rng(vocab)
    for seed in range(30 if vocab < 10_000 else 10):
        logits = np.stack([peaked(random, vocab) for _ in range(3)])
        wanted = [params(seed=seed, **VARIANTS[name]), GREEDY, params(seed=(1 << 64) - 1 - seed, **VARIANTS[name])]
        rows = Rows(wanted)
        rows.known += seed % 2
        indices = (rows.known - rows.prompts)[list(ROWS.values())]
        expected = Sampler().sample(logits, wanted, indices)
        assert rows.append(torch.from_numpy(logits)) == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_and_equal_logits_draw_what_numpy_draws(name: str) -> None:
    cases: list[npt.NDArray[np.float32]] = [np.zeros((3, 700), dtype=np.float32)]
    masked = np.full((3, 700), -np.inf, dtype=np.float32)
    masked[:, [5, 77, 690]] = [1.0, 1.0, -300.0]
    cases.append(masked)
    for seed in range(20):
        wanted = [params(seed=seed + 100 * place, **VARIANTS[name]) for place in range(3)]
        for logits in cases:
            rows = Rows(wanted)
            expected = Sampler().sample(logits, wanted, (rows.known - rows.prompts)[[4, 1, 3]])
            assert rows.append(torch.from_numpy(logits)) == expected


def test_a_part_of_the_requests() -> None:
    rows = Rows([params(seed=1), GREEDY, params(seed=3)])
    logits = np.stack([peaked(np.random.default_rng(0), 50) for _ in range(2)])
    expected = Sampler().sample(logits, [GREEDY, params(seed=3)], np.array([0, 2]))
    assert rows.append(torch.from_numpy(logits), [1, 2]) == expected
    assert rows.known.tolist() == [0, 2, 2, 4, 4, 5]
    assert rows.tokens[[1, 3], [1, 3]].tolist() == expected


def test_each_call_draws_for_its_own_members_places_and_logits() -> None:
    """One drawer keeps arguments from call to call: one of them changes at a time here."""
    rows, other = Rows(), StepRows.find(["c", "a", "b"], ROWS, dict.fromkeys(ROWS.values(), GREEDY))
    three, two, members = np.array([0, 1, 2]), np.array([2, 0]), rows._step_rows
    wide = torch.eye(3, 9)
    calls = [
        (members, three, torch.eye(3, 5), [0, 1, 2]),
        (members, three, torch.eye(3, 5).flip(1).contiguous(), [4, 3, 2]),
        (members, three, wide[:, 2:7], [0, 0, 0]),
        (members, three, wide[:, :5], [0, 1, 2]),
        (other, three, wide[:, :5], [0, 1, 2]),
        (other, two, torch.eye(2, 5), [0, 1]),
        (members, two, torch.eye(2, 5), [0, 1]),
        (members, three, torch.eye(3, 5), [0, 1, 2]),
    ]
    for at, places, logits, expected in calls:
        known = rows.known.copy()
        found = rows._drawer.append(at, places, logits)
        assert found is not None
        assert found.tolist() == expected
        drawn_for = at.rows[places]
        has_room = known[drawn_for] < 8
        np.testing.assert_array_equal(rows.known[drawn_for], known[drawn_for] + has_room)
        drawn_for, kept = drawn_for[has_room], np.array(expected)[has_room]
        np.testing.assert_array_equal(rows.tokens[drawn_for, known[drawn_for]], kept)
        rows.known[:] = range(6)


def test_equal_zeros_of_both_signs() -> None:
    assert Rows().append(torch.tensor([[-1.0, -0.0, 0.0], [0.0, -0.0, -1.0], [-1.0, -1.0, -0.0]])) == [1, 0, 2]


@pytest.mark.parametrize("wanted", [GREEDY, params(top_p=0.9)], ids=["greedy", "random"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 1030, 1999])
def test_what_is_not_finite_is_left_to_the_caller(value: float, place: int, wanted: CoreSamplingParams) -> None:
    rows, logits = Rows([wanted] * 3), torch.zeros(3, 2000)
    logits[2, place] = value
    assert rows.append(logits) is None
    assert rows.append(torch.full((3, 2000), -float("inf"))) is None
    assert rows.known.tolist() == list(range(6))
    assert not rows.tokens.any()


def test_forbidden_tokens_are_passed_over() -> None:
    logits = torch.full((3, 40), -float("inf"))
    logits[[0, 1, 2], [39, 0, 17]] = -5.0
    assert Rows().append(logits) == [39, 0, 17]
    assert Rows([params(seed=seed) for seed in range(3)]).append(logits) == [39, 0, 17]


def test_a_full_row_keeps_its_tokens() -> None:
    rows = Rows()
    rows.known[1] = 8
    assert rows.append(torch.eye(3, 9)) == [0, 1, 2]
    assert rows.known.tolist() == [0, 8, 2, 4, 5, 5]
    assert rows.tokens[[3, 4], [3, 4]].tolist() == [2, 0]


def test_rows_of_a_wider_matrix() -> None:
    """Models may cut the logits of tokens that do not exist."""
    wide = torch.zeros(3, 100)
    wide[:, 60], wide[:, 20] = 9.0, 1.0
    assert Rows().append(wide[:, :50]) == [20] * 3
    assert Rows().append(torch.zeros(50, 3).T) is None, "its elements lie apart"
    assert Rows().append(torch.zeros(3, 8, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("places", [[0, 1, 3], [0, -1, 1], [0, 1, 1 << 32], [0, 1 << 31, 2]])
def test_places_that_a_step_does_not_have_are_refused(places: list[int]) -> None:
    rows = Rows()
    with pytest.raises(AssertionError, match="one is not there"):
        rows.append(torch.zeros(3, 5), places)
    assert rows.known.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.append(torch.zeros(3, 5)) == [0, 0, 0]


def test_more_tokens_than_rows_of_logits_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 tokens are to be drawn from 2 rows"):
        Rows().append(torch.zeros(2, 5))
    rows = Rows()
    rows.known[4] = -1
    with pytest.raises(AssertionError, match="one is not there"):
        rows.append(torch.zeros(3, 5))
