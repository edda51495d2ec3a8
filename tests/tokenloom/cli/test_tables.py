"""Tables that fit a terminal."""

import pytest
from rich.text import Text

from tokenloom.cli.tables import UNLIMITED, Column, fitted, output_width

COLUMNS = (
    Column("PART", ["a", "漢字"]),
    Column("PID", ["1", "123456"], is_right=True, rank=1),
    Column("MEMORY", ["1,200 MB", "3 MB"], Column("MEM", ["1.2G", "3M"]), is_right=True, rank=2),
    Column("HEALTH", [Text("up", "green"), Text("down", "red")]),
)


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (UNLIMITED, "PART  PID  MEMORY  HEALTH"),
        (30, "PART  PID  MEMORY  HEALTH"),
        (29, "PART  PID  MEM  HEALTH"),
        (25, "PART  MEM  HEALTH"),
        (17, "PART  HEALTH"),
        (0, "PART  HEALTH"),
    ],
)
def test_cells_are_shortened_first_and_then_columns_left_out(width: int, heads: str) -> None:
    lines = fitted(COLUMNS, width).plain.splitlines()
    assert lines[0].split() == heads.split()
    assert max(map(len, lines)) <= max(width, len("PART  HEALTH"))


def test_numbers_end_below_each_other_and_wide_characters_count_twice() -> None:
    assert fitted(COLUMNS, 29).plain.splitlines() == [
        "PART     PID   MEM  HEALTH",
        "a          1  1.2G  up",
        "漢字  123456    3M  down",
    ]


def test_without_rows_there_are_titles() -> None:
    assert fitted([Column("A", []), Column("B", [])], 80).plain == "A  B"


def test_an_output_that_is_no_terminal_is_as_wide_as_a_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output_width() == UNLIMITED
    monkeypatch.setenv("COLUMNS", "80")
    assert output_width() == 80
