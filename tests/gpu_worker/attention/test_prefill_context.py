"""Tests how the tokens of long prompts are divided over ranks that each have the whole model."""

import numpy as np
import pytest

from tokenloom.gpu_worker.attention.context_backend import LEAST_TOKENS, RowRun, divide

BLOCK = 16


def rows_of(share: list[RowRun]) -> list[int]:
    return [row for _, begin, end in share for row in range(begin, end)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("computed", [0, 5, 16, 100])
def test_every_token_has_one_rank_and_all_ranks_as_much_to_do(size: int, computed: int) -> None:
    lengths = np.array([1, 2000, 30, 1])
    starts, ends = np.concatenate(([0], np.cumsum(lengths))), lengths + np.array([700, computed, 0, 3])
    shares = divide(starts, ends, BLOCK, size)
    assert shares is not None
    rows = [rows_of(share) for share in shares]
    assert sorted(row for each in rows for row in each) == list(range(int(lengths.sum())))
    assert all(each == sorted(each) for each in rows)
    long = [[run for run in share if run.request == 1] for share in shares]
    assert all(len(runs) == 2 for runs in long), "one from the front and one from the back"
    # What a token costs in attention grows with its position.
    work = [sum(range(begin + computed, end + computed)) for runs in long for _, begin, end in [*runs]]
    costs = [sum(work[2 * rank : 2 * rank + 2]) for rank in range(size)]
    assert max(costs) < 1.15 * min(costs)
    for _, begin, end in (run for runs in long for run in runs):
        for row in (begin, end):
            position = row - 1 + computed
            assert position % BLOCK == 0 or row in (1, 2001), "a piece ends with a block"


def test_a_step_without_a_long_prompt_is_not_divided() -> None:
    fewest = 2 * LEAST_TOKENS
    for lengths, is_divided in (([fewest - 1] * 9, False), ([1] * 64, False), ([1, fewest], True)):
        starts = np.concatenate(([0], np.cumsum(lengths)))
        assert (divide(starts, np.array(lengths), BLOCK, 2) is not None) is is_divided
