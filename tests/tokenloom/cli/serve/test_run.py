"""``tokenloom run``: a short list, and one question to a mesh that lasts as long as the chat."""

import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tokenloom.cli.terminal import terminal
from tokenloom.cli.main import app
from tokenloom.cli.serve.run import MODELS
from tokenloom.cli.serve.serve_options import OFFERS
from tokenloom.services.runtime.host.options import flag
from tokenloom.supervisor.state_dir import running_meshes

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "models.md"


def test_without_a_name_the_list_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CliRunner().invoke(app, ["run"]).stdout
    for name, each in MODELS.items():
        assert f"\n{name} " in whole
        assert each.model in whole
        assert each.licence in whole
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, CliRunner().invoke(app, ["run"]).stdout.splitlines())) <= 80


def test_the_models_are_built_in_and_their_flags_exist() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ") and "| built in |" in row]
    families = {row.split(" ")[1].rpartition("-")[0] for row in rows}
    flags = {flag(name) for name in OFFERS}
    for name, each in MODELS.items():
        assert name == "demo" or each.model.rpartition("-")[0] in families or f"| {each.model} | built in |" in rows
        assert set(each.flags[::2]) <= flags


@pytest.mark.parametrize(
    ("name", "said"), [("Qwen/Qwen3-0.6b", "did you mean qwen3-0.6b?"), ("zzz", "the list has demo, qwen3-0.6b")]
)
def test_another_name_is_told_the_nearest_and_the_command_for_any_model(name: str, said: str) -> None:
    result = CliRunner().invoke(app, ["run", name, "hi"])
    assert result.exit_code == 2
    assert said in result.output
    assert "`tokenloom serve MODEL` serves any other model" in result.output


def test_a_mesh_with_keys_and_a_certificate_is_asked_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(app, ["certs", str(tmp_path / "mesh")]).exit_code == 0
    monkeypatch.setenv("TOKENLOOM_API_KEY", "first,second")
    monkeypatch.setenv("TOKENLOOM_PUBLIC_TLS_CERT", str(tmp_path / "mesh" / "gateway.crt"))
    monkeypatch.setenv("TOKENLOOM_PUBLIC_TLS_KEY", str(tmp_path / "mesh" / "gateway.key"))
    result = CliRunner().invoke(app, ["run", "demo", "--temperature", "0"], input="What is 3 plus 4?\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "3 + 4 = 7.\n"
    assert "starting the mesh …" in result.stderr
    assert "at https://127.0.0.1:" in result.stderr
    assert not list(running_meshes())


def test_a_conversation_on_a_terminal_ends_the_mesh_too(runtime_dir: Path) -> None:
    names = {"XDG_RUNTIME_DIR": str(runtime_dir), "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80"}
    with terminal("run", "demo", "--temperature", "0", environment=names) as screen:
        screen.read_until("at http://127.0.0.1:")
        screen.read_until("Ctrl-D leaves")
        screen.read_until("> ")
        screen.type("What is 3 plus 4?\n")
        shown = screen.read_until("3 + 4 = 7.")
        screen.read_until("> ")  # the line editor loses what is typed while it sets up the terminal
        screen.type("\x04")
        assert screen.end() == 0
    assert "\x1b[3" not in shown
    assert not list(running_meshes())


def test_a_mesh_that_does_not_start_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["run", "demo", "hi", "--port", port])
    assert result.exit_code == 1
    assert f"{port}" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_process_that_says_nothing_is_no_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = CliRunner().invoke(app, ["run", "demo", "hi"])
    assert result.exit_code == 1
    assert "the mesh ended before it was ready" in result.stderr
