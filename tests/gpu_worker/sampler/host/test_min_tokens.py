import pytest

from tests.gpu_worker.sampler.host.processing import OneRow


@pytest.mark.parametrize("num_accepted", [0, 2])
def test_no_stop_token_before_there_are_so_many(num_accepted):
    row = OneRow(output=[7] * num_accepted, min_tokens=3, stop_token_ids=(2, 5))
    for _ in range(num_accepted, 3):
        assert row.masked(8) == {2, 5}
        row.append(7)
    assert row.masked(8) == set()


def test_tokens_of_earlier_attempts_may_be_enough():
    assert OneRow(output=[7] * 4, min_tokens=3, stop_token_ids=(2,)).masked(8) == set()


def test_without_stop_tokens_there_is_nothing_to_mask():
    assert OneRow(min_tokens=3).masked(8) == set()
