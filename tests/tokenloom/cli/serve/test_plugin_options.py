"""``--plugins`` of the command line: commands of packages, and which part of a mesh gets which package."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tokenloom.cli import main
from tokenloom.cli.main import app
from tokenloom.preflight.findings import examine_plugins
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.supervisor.layout import MeshOptions

PEERS = ("--tokenizers", "unix:/t", "--output-processors", "unix:/o", "--coordinator", "unix:/c")


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    yield tmp_path
    main._named.clear()


def test_a_command_of_a_package_runs_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = CliRunner().invoke(app, ["--plugins", EXAMPLE_NAME, "greet", "--name", "Ann"])
    assert (named.exit_code, named.stdout) == (0, "Hello, Ann.\n")
    main._named.clear()
    assert "No such command 'greet'" in CliRunner().invoke(app, ["greet"]).output
    monkeypatch.setenv("TOKENLOOM_PLUGINS", EXAMPLE_NAME)
    assert CliRunner().invoke(app, ["greet"]).stdout == "Hello, world.\n"
    assert "Greet somebody." in CliRunner().invoke(app, ["--help"], catch_exceptions=False).stdout


def test_a_package_without_commands_is_refused(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages, "acme", {"tokenloom.schedulers": {"s": "acme:s"}})
    refused = CliRunner().invoke(app, ["--plugins", "acme", "ps"])
    assert refused.exit_code == 2
    assert "has nothing for the cli" in refused.output
    monkeypatch.setenv("TOKENLOOM_PLUGINS", "acme")  # of the parts of a mesh
    assert "No such command 'greet'" in CliRunner().invoke(app, ["greet"]).output


@pytest.mark.parametrize("source", ["1 / 0", "raise SystemExit(3)", "other = 1"])
def test_a_command_that_cannot_be_loaded_is_named_in_one_line(packages: Path, source: str) -> None:
    install(packages, "broken_command", {"tokenloom.cli_commands": {"go": "broken_command:go"}}, source)
    refused = CliRunner().invoke(app, ["--plugins", "broken_command", "go"])
    assert refused.exit_code == 2
    words = " ".join(refused.output.replace("│", " ").split())
    assert "the command go of a plugin cannot be loaded from broken_command:go: " in words


def test_packages_are_named_by_one_flag() -> None:
    refused = CliRunner().invoke(app, ["--plugins", EXAMPLE_NAME, f"--plugins={EXAMPLE_NAME}", "greet"])
    assert refused.exit_code == 2
    assert "is given twice; separate the names by commas" in " ".join(refused.output.split())


def test_each_part_gets_the_packages_that_are_for_it(started: list[MeshOptions], packages: Path) -> None:
    install(packages, "acme", {"tokenloom.placement_rules": {"p": "acme:p"}})
    names = f"{EXAMPLE_NAME},Acme"
    result = CliRunner().invoke(app, ["serve", "--plugins", names, "--placement", "acme:p"])
    assert result.exit_code == 0, result.output
    (options,) = started
    own = {service: [word for word in words if "plugins" in word] for service, words in options.flags.items()}
    assert own == {
        "engine": [f"--plugins={EXAMPLE_NAME}"],
        "gateway": [f"--plugins={EXAMPLE_NAME}"],
        "tokenizer": [f"--plugins={EXAMPLE_NAME}"],
        "coordinator": [f"--plugins={EXAMPLE_NAME},acme"],
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--plugins", "nobody"], "no package nobody is installed"),
        (["--scheduling-policy", f"{EXAMPLE_NAME}:shortest_first"], f"with --plugins {EXAMPLE_NAME}"),
        (["--plugins", EXAMPLE_NAME, "--scheduling-policy", f"{EXAMPLE_NAME}:other"], "has no other among its"),
        (["--chat-template", f"{EXAMPLE_NAME}:shout"], f"with --plugins {EXAMPLE_NAME}"),
        (["--device", "acme:x"], "no package acme is installed"),
        (["--scheduling-policy", ""], "must be one of fcfs, priority"),
        (["--scheduling-policy", "lifo"], "must be one of fcfs, priority, or PACKAGE:NAME of a plugin"),
        (["--plugins", f"{EXAMPLE_NAME},{EXAMPLE_NAME}"], "is named 2 times"),
    ],
)
def test_a_mesh_with_a_wrong_plugin_does_not_start(
    started: list[MeshOptions], arguments: list[str], reason: str
) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code != 0
    assert reason in " ".join(result.output.split())
    assert not started


def test_a_service_refuses_what_is_not_for_it(packages: Path) -> None:
    install(packages, "acme", {"tokenloom.schedulers": {"s": "acme:s"}})
    with pytest.raises(ValueError, match=r"--plugins: acme 1\.0 \(schedulers\) has nothing for the gateway"):
        GatewaySettings.read([*PEERS, "--plugins", "acme"], {})
    with pytest.raises(ValueError, match="has nothing for the encoder"):
        EncoderSettings.read(["--coordinator", "unix:/c"], {"TOKENLOOM_PLUGINS": EXAMPLE_NAME})
    file = packages / "gateway.toml"
    file.write_text(f'plugins = ["{EXAMPLE_NAME}"]')
    assert GatewaySettings.read([*PEERS, "--config", str(file)], {}).plugins == (EXAMPLE_NAME,)


def test_doctor_lists_packages_without_importing_them(packages: Path) -> None:
    install(packages, "acme", {"tokenloom.schedulerz": {"s": "acme:s"}}, "raise SystemExit")
    found = {each.text.split()[0]: each.level for each in examine_plugins()}
    assert found[EXAMPLE_NAME] == "ok"
    assert [each.level for each in examine_plugins() if "acme" in each.text] == ["warn"]
