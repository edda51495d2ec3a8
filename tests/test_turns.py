"""The turns of the cases of long suites."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.turns import DAYS, cases_of_other_days

ROOT = Path(__file__).parents[1]
FILE = "tests/parity/test_entries.py"


@dataclass(frozen=True)
class Case:
    """A case as pytest collects it."""

    nodeid: str
    id: str

    @property
    def callspec(self) -> "Case":
        return self


@dataclass(frozen=True)
class Plain:
    """A test without parameters."""

    nodeid: str


def others(items: list[Any], day: int) -> set[Any]:
    return set(cases_of_other_days(items, day))


CASES = [Case(f"{FILE}::{test}[{number}]", str(number)) for test in ("one", "two") for number in range(10)]


def test_every_case_has_its_day_and_tests_without_cases_run_each_day() -> None:
    always = [Plain(f"{FILE}::alone"), Case("tests/test_turns.py::one[0]", "0")]
    ran = [case for day in range(100, 100 + DAYS[FILE]) for case in {*CASES} - others([*CASES, *always], day)]
    assert sorted(case.nodeid for case in ran) == sorted(case.nodeid for case in CASES)
    assert not {*always} & others([*CASES, *always], 3)


def test_tests_that_share_a_case_run_on_the_same_day() -> None:
    left_out = others(CASES, 1)
    assert {case.id for case in left_out if "one" in case.nodeid} == {case.id for case in {*CASES} & left_out}
    assert 0 < len(left_out) < len(CASES)
    assert len(left_out) == 2 * len({case.id for case in left_out})


def test_the_files_exist() -> None:
    assert all((ROOT / file).is_file() for file in DAYS)
