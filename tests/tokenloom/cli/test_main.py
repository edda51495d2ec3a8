"""The command's surface."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tokenloom import __version__
from tokenloom.cli.main import app


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"tokenloom {__version__}\n"


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "./nowhere"],
        ["serve", "--engines", "0"],
        ["serve", "--prefill", "1"],
        ["serve", "--decode", "1"],
        ["serve", "--engines", "2", "--prefill", "1", "--decode", "1"],
        ["serve", "--port", "70000"],
        ["demo", "--model", "./nowhere"],
    ],
)
def test_bad_arguments_end_with_status_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["srve"], "Did you mean 'serve'?"),
        (["bench", "throughputs"], "Did you mean 'throughput'?"),
        (["serve", "--prot", "1"], "--port"),
        (["chat", "--sytem", "x"], "--system"),
    ],
)
def test_a_mistyped_name_is_told_the_nearest(arguments: list[str], wanted: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert wanted in " ".join(result.output.replace("│", " ").split()), "a narrow terminal breaks the line"


def test_the_command_starts_without_torch() -> None:
    code = "import sys, tokenloom.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
