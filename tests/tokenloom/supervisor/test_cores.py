"""How cores are divided."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.supervisor.cores import Share, divide


def test_one_engine_has_the_machine() -> None:
    assert divide(1, [0, 1, 2]) == [Share((), 3)]


def test_more_engines_than_cores_are_not_bound() -> None:
    assert divide(3, [0, 1]) == [Share((), 1)] * 3


@given(st.integers(2, 16), st.sets(st.integers(0, 200), min_size=16, max_size=64))
def test_cores_are_shared_out_completely_and_evenly(engines: int, cores: set[int]) -> None:
    shares = divide(engines, sorted(cores))
    assert sorted(cpu for share in shares for cpu in share.cpus) == sorted(cores)
    sizes = [len(share.cpus) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [share.threads for share in shares]
