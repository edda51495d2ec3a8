"""`bench.async_scheduling` on a worker that does not even wait."""

import pytest

from tokenloom.bench.engine.async_scheduling import Case, measure_gaps, run_case
from tokenloom.engine_core.data.config import WorkerConfig


def test_each_pair_has_a_speed_with_and_without() -> None:
    case = Case("hash", WorkerConfig(model="", worker="hash"), requests=3, input_len=4, output_len=5)
    speeds = run_case(case, pairs=2)
    assert len(speeds) == 2
    assert all(off > 0 and on > 0 for off, on in speeds)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_gaps_are_those_of_steps_in_which_requests_decode(num_drafts: int) -> None:
    worker = WorkerConfig(model="", worker="timed", step_seconds=0.001)
    gaps = measure_gaps(Case("timed", worker, requests=4, input_len=4, output_len=24), num_drafts)
    assert len(gaps) == 23 if not num_drafts else 5 < len(gaps) < 23
    assert gaps == sorted(gaps)
    assert gaps[0] >= 0
