"""The turns of long tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.turns import ALWAYS, CASES, FILES, FOLDERS, OF_EACH_TEST, of_other_turns

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


def others(items: list[Any], turn: int) -> set[Any]:
    return set(of_other_turns(items, turn))


OF_FILE = [Case(f"{FILE}::{test}[{number}]", str(number)) for test in ("one", "two") for number in range(10)]


def test_every_case_has_its_turn() -> None:
    always = [Plain(f"{ALWAYS[0]}::one"), Case("tests/test_turns.py::one[0]", "0")]
    ran = [case for turn in range(100, 100 + CASES[FILE]) for case in {*OF_FILE} - others([*OF_FILE, *always], turn)]
    assert sorted(case.nodeid for case in ran) == sorted(case.nodeid for case in OF_FILE)
    assert not {*always} & others([*OF_FILE, *always], 3)


def test_tests_that_share_a_case_run_in_the_same_turn() -> None:
    left_out = others(OF_FILE, 1)
    assert {case.id for case in left_out if "one" in case.nodeid} == {case.id for case in {*OF_FILE} & left_out}
    assert 0 < len(left_out) < len(OF_FILE)
    assert len(left_out) == 2 * len({case.id for case in left_out})


def test_of_each_test_that_computes_some_cases_run_and_all_in_turn() -> None:
    for place, parts in OF_EACH_TEST.items():
        test, ids = f"{place}::one", [f"{level}-{rows}" for level in ("a", "b", "c") for rows in range(20)]
        plain, cases = Plain(test), [Case(f"{test}[{id}]", id) for id in ids]
        ran = [[*({*cases} - others([plain, *cases], turn))] for turn in range(7, 7 + parts)]
        assert {case.id for of_turn in ran for case in of_turn} == {*ids}
        assert sum(map(len, ran)) == len(ids), "once in so many turns"
        assert all(len({case.id[0] for case in of_turn}) == 3 for of_turn in ran), "of all values of each parameter"
        always = all(plain not in others([plain, *cases], turn) for turn in range(parts))
        assert always != place.startswith(FOLDERS), "files of long folders take turns too"


def test_every_long_file_has_its_turn_and_the_turns_are_of_like_size() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    tests = [Plain(f"{path.relative_to(ROOT)}::one") for path in files]
    daily = {test for test in tests if test.nodeid.startswith(ALWAYS)}
    parts = [{*tests} - others(tests, turn) for turn in range(FILES)]
    assert {*tests} == set().union(*parts)
    assert all(daily <= part for part in parts)
    assert sum(map(len, parts)) == len(tests) + (FILES - 1) * len(daily)
    assert max(map(len, parts)) <= 2 * min(map(len, parts))


def test_the_files_exist() -> None:
    assert all((ROOT / file).is_file() for file in (*CASES, *ALWAYS))
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert all((ROOT / place).exists() for place in OF_EACH_TEST)
