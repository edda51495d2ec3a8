"""The quick commands of README, quick start and tutorials do what their pages say."""

import subprocess
import sys

import pytest

from tests.docs.console_blocks import PAGES, ROOT


@pytest.mark.parametrize("page", PAGES)
def test_a_page_can_be_followed(page: str) -> None:
    command = [sys.executable, "-m", "tests.docs.check_console", "--quick", page]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "typed " in done.stdout
