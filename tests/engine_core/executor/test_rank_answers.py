import pytest

from tokenloom.engine_core.data.errors import (
    ExecutorFailedError,
    RanksDifferError,
    WeightsDamagedError,
    WorkerLostError,
)
from tokenloom.engine_core.data.model_info import ModelInfo
from tokenloom.engine_core.executor.ranks import joined_results, merged_info

REFUSED, FAILED = ValueError("no such file"), ExecutorFailedError("worker 1: OSError: the disk failed")
LOST = WorkerLostError("worker 1 ended with status -9")
DAMAGED = WeightsDamagedError("worker 1: bytes 0 to 7 of model.a have changed since they were loaded")


def test_results_are_those_of_all_ranks() -> None:
    assert joined_results([1, None, 3]) == [1, None, 3]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([REFUSED, REFUSED], REFUSED),
        ([REFUSED, FAILED], FAILED),
        ([REFUSED], REFUSED),
        ([FAILED], FAILED),
        ([1, LOST], LOST),
        ([1, DAMAGED], DAMAGED),
        ([LOST, DAMAGED], DAMAGED),
    ],
)
def test_an_error_of_every_rank_is_raised_as_it_is(answers: list[object], error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        joined_results(answers)
    assert raised.value is error


@pytest.mark.parametrize(("error", "is_refused"), [(REFUSED, True), (FAILED, False)])
def test_a_call_that_some_ranks_made_is_an_error_with_their_results(error: Exception, is_refused: bool) -> None:
    with pytest.raises(RanksDifferError) as raised:
        joined_results(["a", error, "c"])
    assert raised.value.results == ["a", "c"]
    assert raised.value.is_refused is is_refused
    assert str(raised.value).count("worker 1: ") == 1
    assert str(raised.value).endswith("done by worker 0, worker 2")


def test_a_stage_without_states_does_not_hide_how_others_compute_theirs() -> None:
    """The rank that draws is the last one, and prompts must be cut where the chunks of the first one end."""
    first = ModelInfo(9, 64, 8, "a", "cuda/states-gdn-products-chunk64-strict", state_bytes=5, state_chunk=64)
    last = ModelInfo(9, 64, 16, "b", "cuda")
    merged = merged_info([first, last], 1)
    assert (merged.state_chunk, merged.state_bytes, merged.numerics) == (64, 5, first.numerics)
    assert merged_info([last, last], 1).numerics == "cuda"
