"""How cores are divided."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.supervisor.cores import Share, divide, siblings


def test_one_engine_has_a_small_machine() -> None:
    assert divide(1, [0, 1, 2], str) == [Share((), 3)]


def test_more_engines_than_cores_are_not_bound() -> None:
    assert divide(3, [0, 1], str) == [Share((), 1)] * 3


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (2, [Share((0,), 1), Share((1,), 1)]),
        (4, [Share((0, 1), 2), Share((2, 3), 2)]),
        (16, [Share(tuple(range(2, 9)), 7), Share(tuple(range(9, 16)), 7)]),
    ],
)
def test_a_prefill_and_a_decode_engine(cores: int, expected: list[Share]) -> None:
    assert divide(2, list(range(cores)), str) == expected


@pytest.mark.parametrize(("cores", "threads"), [(2, 2), (4, 4), (7, 7), (8, 7), (16, 14), (64, 56)])
def test_from_eight_cores_on_one_of_eight_is_left_to_the_services(cores: int, threads: int) -> None:
    assert divide(1, list(range(cores)), str) == [Share((), threads)]


def test_engines_that_need_every_core_get_it() -> None:
    assert divide(8, list(range(8)), str) == [Share((cpu,), 1) for cpu in range(8)]


def test_engines_do_not_share_the_hardware_threads_of_a_core() -> None:
    """Cores with two threads, whose second ones have the numbers from 4 on."""
    assert divide(2, list(range(8)), lambda cpu: f"{cpu % 4},{cpu % 4 + 4}") == [
        Share((0, 4, 1, 5), 4),
        Share((2, 6, 3, 7), 4),
    ]


@given(st.integers(2, 16), st.sets(st.integers(0, 200), min_size=19, max_size=64))
def test_cores_are_shared_out_evenly(engines: int, cores: set[int]) -> None:
    shares = divide(engines, sorted(cores), str)
    assert sorted(cpu for share in shares for cpu in share.cpus) == sorted(cores)[len(cores) // 8 :]
    sizes = [len(share.cpus) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == [share.threads for share in shares]


def test_the_system_names_the_threads_of_a_core(tmp_path: Path) -> None:
    directory = tmp_path / "cpu1/topology"
    directory.mkdir(parents=True)
    (directory / "thread_siblings_list").write_text("1,17\n")
    assert siblings(1, tmp_path) == "1,17"
    assert siblings(2, tmp_path) == "2"
