"""The kernel draws what numpy draws, and appends it."""

import shutil
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.gpu_worker.sampler.host.variants import VARIANTS, params, peaked
from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.gpu_worker.batch.kernel_sampler import KernelSampler
from tokenloom.gpu_worker.batch.step_arrays import StepRows
from tokenloom.gpu_worker.kernels.threads import set_kernel_threads
from tokenloom.gpu_worker.sampler.host.sampler import Sampler

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

GREEDY = params(temperature=0.0)
ROWS = {"a": 4, "b": 1, "c": 3}


class Rows:
    """Six rows with room for eight tokens, of which row n knows n and one of them is the prompt."""

    def __init__(self, wanted: Sequence[CoreSamplingParams] = (GREEDY,) * 3) -> None:
        self.tokens = np.zeros((6, 8), dtype=np.int32)
        self.known, self.prompts = np.arange(6), np.ones(6, dtype=np.int64)
        self._drawer = KernelSampler(self.tokens, self.known, self.prompts)
        self._members = StepRows.find(list(ROWS), ROWS, dict(zip(ROWS.values(), wanted, strict=True)))

    def append(self, logits: torch.Tensor, places: Sequence[int] = (0, 1, 2)) -> list[int] | None:
        found = self._drawer.append(self._members, np.array(places), logits)
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
    three, two, members = np.array([0, 1, 2]), np.array([2, 0]), rows._members
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
