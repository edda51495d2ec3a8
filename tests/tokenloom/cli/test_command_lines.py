"""Command lines of nonsense, by seed; ``make soak`` runs 10,000."""

import subprocess
import sys

import pytest

from tests.soak.command_lines import check, check_words, groups, nonsense_for_each

SEEDS = 200
BATCH = 50


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_nonsense_ends_in_one_line(first: int) -> None:
    ends = [check(seed) for seed in range(first, first + BATCH)]
    assert {"reached", "2"} <= set(ends), "some is refused, and some is none"


@pytest.mark.parametrize("group", groups())
def test_nonsense_for_each_option_of_each_command_ends_in_one_line(group: str) -> None:
    ends = [check_words(words) for words in nonsense_for_each(group)]
    assert "2" in ends


def test_the_program_runs_by_itself() -> None:
    """Its process has imported nothing before that the commands import, as this one has."""
    program = [sys.executable, "-m", "tests.soak.command_lines", "--seeds", "2"]
    ended = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (ended.returncode, "2 command lines: " in ended.stdout) == (0, True), ended.stdout
