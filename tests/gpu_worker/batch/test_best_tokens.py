"""The kernel appends what numpy finds."""

import shutil

import numpy as np
import pytest
import torch

from tokenloom.gpu_worker.batch.best_tokens import BestTokens
from tokenloom.gpu_worker.kernels.threads import set_kernel_threads

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

ROWS = np.array([4, 1, 3])


class Rows:
    """Six rows with room for eight tokens, of which row n knows n."""

    def __init__(self) -> None:
        self.tokens = np.zeros((6, 8), dtype=np.int32)
        self.known = np.arange(6)
        self._best = BestTokens(self.tokens, self.known)

    def append(self, logits: torch.Tensor) -> list[int] | None:
        found = self._best.append(ROWS.ctypes.data, logits)
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
            assert rows.tokens[ROWS, [4, 1, 3]].tolist() == expected
            assert rows.known.tolist() == [0, 2, 2, 4, 5, 5]
    finally:
        set_kernel_threads(0)


def test_equal_zeros_of_both_signs() -> None:
    assert Rows().append(torch.tensor([[-1.0, -0.0, 0.0], [0.0, -0.0, -1.0], [-1.0, -1.0, -0.0]])) == [1, 0, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 5, 1030, 1999])
def test_what_is_not_finite_is_left_to_the_caller(value: float, place: int) -> None:
    rows, logits = Rows(), torch.zeros(3, 2000)
    logits[2, place] = value
    assert rows.append(logits) is None
    assert rows.append(torch.full((3, 2000), -float("inf"))) is None
    assert rows.known.tolist() == list(range(6))
    assert not rows.tokens.any()


def test_forbidden_tokens_are_passed_over() -> None:
    logits = torch.full((3, 40), -float("inf"))
    logits[[0, 1, 2], [39, 0, 17]] = -5.0
    assert Rows().append(logits) == [39, 0, 17]


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
