"""`bench.async_scheduling` on a worker that does not even wait."""

from tokenloom.bench.engine.async_scheduling import Case, run_case
from tokenloom.engine_core.data.config import WorkerConfig


def test_each_pair_has_a_speed_with_and_without() -> None:
    case = Case("hash", WorkerConfig(model="", worker="hash"), requests=3, input_len=4, output_len=5)
    speeds = run_case(case, pairs=2)
    assert len(speeds) == 2
    assert all(off > 0 and on > 0 for off, on in speeds)
