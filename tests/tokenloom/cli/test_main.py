"""The command's surface."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.tokenloom.cli.terminal import terminal
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
        (["serve", "-tp", "2"], "-tp is a flag of vLLM: use --tensor-parallel-size"),
        (["serve", "--disable-log-requests"], "use --no-access-log"),
        (["bench", "serve", "--prot", "1"], "--prot: no such option"),
    ],
)
def test_a_mistyped_name_is_told_the_nearest(arguments: list[str], wanted: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert wanted in " ".join(result.output.replace("│", " ").split()), "a narrow terminal breaks the line"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_help_cuts_no_option_and_stays_in_its_width(width: int) -> None:
    result = CliRunner().invoke(app, ["serve", "--help=all"], env={"COLUMNS": str(width)})
    lines = result.stdout.splitlines()
    for name in ("--enable-prompt-embeds/--no-enable-prompt-embeds", "--keep-disconnected-requests", "--port"):
        assert any(line.startswith(f"  {name} ") or line == f"  {name}" for line in lines), name
    assert {"Mesh:", "Engine:", "Scheduler:", "Gateway:"} <= set(lines)
    assert max(len(line) for line in lines if not line.startswith("  -")) <= max(width, 60)
    assert max(map(len, lines)) <= max(width, 80)


@pytest.mark.parametrize("command", ["serve", "generate", "config"])
def test_the_first_page_of_many_options_lists_the_groups_of_the_others(command: str) -> None:
    lines = help_lines(command, "--help")
    assert "Options:" in lines
    assert any(line.startswith("  scheduler ") and "--max-num-seqs" in line for line in lines)
    assert not any(line.startswith("  --max-num-seqs") for line in lines)
    assert len(lines) < 100 < len(help_lines(command, "--help=all"))
    assert max(map(len, lines)) <= 80
    assert "--help=GROUP" in lines[-2]


def test_a_group_or_a_word_chooses_the_options_of_the_help() -> None:
    lines = help_lines("serve", "--help=structured-output")
    assert "Structured output:" in lines
    assert {"--structured-outputs-backend", "--disable-any-whitespace/--no-disable-any-whitespace"} == flags(lines)
    assert help_lines("serve", "--help=Structured_Output") == lines
    found = flags(help_lines("serve", "--help=lora-modules"))
    assert found == {"--lora-modules"}
    assert flags(help_lines("ps", "--help=json")) == {"--json"}


def test_a_topic_that_the_help_does_not_have_is_told_the_groups() -> None:
    result = CliRunner().invoke(app, ["serve", "--help=nonsense"])
    assert result.exit_code == 2
    assert "'nonsense' is no group of options and in no option's name; groups: " in result.output
    assert "structured-output" in result.output


def help_lines(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def flags(lines: list[str]) -> set[str]:
    return {line.split()[0] for line in lines if line.startswith("  --")}


def test_the_help_of_the_commands_imports_none_of_them() -> None:
    code = "import sys; from tokenloom.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "sys.exit(bool({'grpc', 'numpy', 'rich', 'tokenloom.cli.serve.serve'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for group in ("Serve:", "Manage a mesh:"):
        assert group in result.stdout
    assert "Measure the engine and the mesh on this machine." in result.stdout


HEAVY = {
    *("asyncio", "google.protobuf", "grpc", "jinja2", "numpy", "prometheus_client", "pydantic", "tokenizers", "torch")
}


LIGHT = (
    *(
        "serve",
        "run",
        "demo",
        "stop",
        "relay",
        "fetch",
        "chat",
        "complete",
        "run-batch",
        "models",
        "generate",
        "ps",
        "top",
        "config",
    ),
    *("doctor", "certs", "chaos", "bench", "build-kernels", "completion"),
)
"""Commands whose options are imported without what runs them."""


@pytest.mark.parametrize("command", LIGHT)
def test_the_help_of_a_command_imports_only_its_options(command: str) -> None:
    code = f"import sys; from tokenloom.cli.main import app; app([{command!r}, '--help'], standalone_mode=False); "
    code += "sys.exit(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    imported = set(result.stderr.split())
    assert "tokenloom.cli.main" in imported
    assert not HEAVY & imported


def test_every_command_has_a_summary_in_the_help() -> None:
    lines = CliRunner().invoke(app, ["--help"]).stdout.splitlines()
    for command in COMMANDS:
        assert any(line.startswith(f"  {command} ") and len(line.split()) > 3 for line in lines), command


def test_the_command_starts_without_torch() -> None:
    code = "import sys, tokenloom.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("without", [True, False])
def test_errors_have_colours_on_a_terminal_and_none_with_the_variable(without: bool) -> None:
    names = {"TERM": "xterm", "NO_COLOR": "1" if without else ""}
    with terminal("serve", "./nowhere", environment=names) as screen:
        shown = screen.read_until("nowhere does not exist")
        assert screen.end() == 2
    assert ("\x1b[" in shown) is not without


def test_the_supervisor_has_no_torch() -> None:
    """It forks its parts where it has one thread, so that what it has loaded is in each of them."""
    code = "import sys, tokenloom.cli.serve.serving; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interrupt_while_modules_are_imported_prints_nothing() -> None:
    """From the first import of the command on, until the command itself handles it."""
    script = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests behind it ignores the signal
sys.argv = ["/usr/bin/tokenloom", "--version"]
import tokenloom.cli
assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
from tokenloom.cli import main
def app():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.raise_signal(signal.SIGINT)
main.app = app
main.main()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
