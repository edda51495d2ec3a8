"""The quick commands of README, quick start and tutorials do what their pages say."""

import subprocess
import sys

import pytest

from tests.docs.check_console import ROOT


# The other pages start more meshes and belong to `make docs-check`.
@pytest.mark.parametrize("page", ["docs/start/quickstart.md"])
def test_a_page_can_be_followed(page: str) -> None:
    command = [sys.executable, "-m", "tests.docs.check_console", "--quick", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "typed " in done.stdout
