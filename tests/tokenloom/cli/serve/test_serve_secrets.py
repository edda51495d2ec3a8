"""Secrets on their way from ``tokenloom serve`` to the parts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.layout import MeshOptions, parts_of
from tokenloom.supervisor.ports import GatewayPorts

SECRET = "a-secret-that-stays-secret"


@pytest.mark.parametrize("where", ["flag", "variable", "file", "table"])
@pytest.mark.parametrize("option", ["api_key", "admin_api_key"])
def test_keys_reach_the_gateway_only_and_no_command_line(
    started: list[MeshOptions], tmp_path: Path, where: str, option: str
) -> None:
    arguments, environment = ["serve"], {}
    file = tmp_path / "mesh.toml"
    if where == "flag":
        arguments += [f"--{option.replace('_', '-')}", SECRET]
    elif where == "variable":
        environment = {f"TOKENLOOM_{option.upper()}": SECRET}
    else:
        table = "[gateway]\n" if where == "table" else ""
        file.write_text(f'{table}{option} = "{SECRET}"\n')
        arguments += ["--config", str(file)]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    assert ("can read this secret" in result.output) == (where == "flag")
    assert SECRET not in result.output
    parts = parts_of(started[0], tmp_path, [GatewayPorts(8000, 9000)])
    variable = f"TOKENLOOM_{option.upper()}"
    assert {part.service for part in parts if SECRET in part.environment.values()} == {"gateway"}
    for part in parts:
        assert variable in part.withheld
        assert not any(SECRET in argument for argument in part.command)


@pytest.mark.parametrize("where", ["flag", "variable"])
def test_only_relays_present_the_certificate_in_front_of_gateways(
    started: list[MeshOptions], tmp_path: Path, where: str
) -> None:
    """Gateways inherited the variable, and relays called them in plain text."""
    make_certificates(tmp_path, days=30)
    given = {"public-tls-cert": str(tmp_path / "gateway.crt"), "public-tls-key": str(tmp_path / "gateway.key")}
    arguments, environment = ["serve", "--relays", "1"], {}
    if where == "flag":
        arguments += [f"--{name}={value}" for name, value in given.items()]
    else:
        environment = {f"TOKENLOOM_{name.upper().replace('-', '_')}": value for name, value in given.items()}
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    relays = [GatewayPorts(8443, 9443)]
    parts = parts_of(started[0], tmp_path, [GatewayPorts(8000, 9000)], relays)
    assert {part.service for part in parts if "TOKENLOOM_PUBLIC_TLS_CERT" in part.environment} == {"relay"}
    assert all("TOKENLOOM_PUBLIC_TLS_CERT" in part.withheld for part in parts)
    presenting = {part.service for part in parts if any("--public-tls-cert" in word for word in part.command)}
    assert presenting == {"relay"}
