"""The Makefile's commands that run tests."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["test", "test-long"])
@pytest.mark.parametrize(
    ("status", "again", "passes"),
    [
        (0, None, True),
        (1, 0, True),  # a test that depends on the machine's load
        (1, 1, False),
        (1, 5, False),  # failures that no test of the last run explains
        (2, 0, False),
        (3, 0, False),
        (5, 0, False),
        (139, 0, False),  # the run crashed
    ],
)
def test_only_failed_tests_are_repeated(
    target: str, status: int, again: int | None, passes: bool, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> "{calls}"\n'
        f'case "$*" in *--last-failed*) exit {0 if again is None else again};; *) exit {status};; esac\n'
    )
    python.chmod(0o755)
    # --old-file: the environment is not what this test is about.
    command = ["make", "--no-print-directory", "--old-file=.venv/.installed", target, "AGAIN=1", f"BIN={tmp_path}"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "AGAIN"))
    }
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode == 0) == passes, run.stdout + run.stderr
    repeated = [line for line in calls.read_text().splitlines() if "--last-failed" in line]
    assert len(repeated) == (status == 1)


def test_the_checks_before_a_landing_repeat_no_broken_run() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {'make test AGAIN=1 TURN="$TURN"', 'make test-long AGAIN=1 TURN="$TURN"'} <= set(lines)
    assert not any("||" in line for line in lines if not line.startswith("#"))
