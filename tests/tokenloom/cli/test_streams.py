"""Standard streams that are closed, full or without a reader."""

import os
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-m", "tokenloom.cli.main")


def in_shell(line: str) -> "subprocess.CompletedProcess[str]":
    """Run a command line in which ``tokenloom`` stands for this one."""
    shell = f'tokenloom() {{ "{sys.executable}" -m tokenloom.cli.main "$@"; }}; {line}'
    return subprocess.run(["bash", "-c", shell], check=False, capture_output=True, text=True, env={**os.environ})


def test_an_output_that_cannot_be_written_is_one_line_and_a_failure() -> None:
    for command in ("config --json", "--version"):  # more and less than a buffer holds
        done = in_shell(f"tokenloom {command} >/dev/full")
        assert done.returncode == 1
        assert done.stderr.endswith("No space left on device\n")
        assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_news() -> None:
    done = in_shell("set -o pipefail; tokenloom config --json | true")
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_that_cannot_be_written_change_no_status() -> None:
    assert in_shell("tokenloom serve ./nowhere 2>/dev/full").returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_those_of_no_other_file(closed: str) -> None:
    done = in_shell(f"tokenloom config --changed {closed}")
    assert (done.returncode, done.stderr) == (0, "")
