"""Completion in shells."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_each_shell(shell: str) -> None:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0
    assert f"complete_{shell}" in result.stdout


@pytest.mark.parametrize(
    ("words", "wanted"), [("tokenloom mod", "models"), ("tokenloom serve --max-num-s", "--max-num-seqs")]
)
def test_commands_and_options_are_completed(words: str, wanted: str) -> None:
    environment = {
        **os.environ,
        "_TOKENLOOM_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv = ['tokenloom']; from tokenloom.cli.main import app; app(prog_name='tokenloom')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [wanted], done.stderr
