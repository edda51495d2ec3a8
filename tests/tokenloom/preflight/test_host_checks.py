"""Ports, files, packages and the directory of sockets, before a process starts."""

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tokenloom.cli.main import app
from tokenloom.cli.serve import serving
from tokenloom.preflight import host
from tokenloom.preflight.host import check_addresses, check_certificate, check_run_directory
from tokenloom.preflight.small_files import CannotServe
from tokenloom.process import unix_socket
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.supervisor.mesh import MeshOutcome
from tokenloom.supervisor.ports import PortTaken, reserved_ports
from tokenloom.supervisor.state_dir import MeshRecord, mesh_directory, write_record


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, socket_dir: Path) -> list[Any]:
    """The meshes that would have started."""
    found: list[Any] = []

    def run_mesh(options: Any, *_: Any) -> MeshOutcome:
        found.append(options)
        return MeshOutcome(interrupted=True, clean=True)

    monkeypatch.setattr(serving, "run_mesh", run_mesh)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    return found


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--port", "0", *arguments])


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_what_is_in_order_starts(started: list[Any]) -> None:
    assert run().exit_code == 0
    assert len(started) == 1


@pytest.mark.parametrize(("soft", "hard", "needed"), [(128, 128, 192), (40, 4096, 52)])
def test_too_few_open_files_are_refused(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, needed: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    wanted = f"the limit of open files is {soft}, and {needed} are needed: raise it with `ulimit -n {needed}`"
    assert wanted in refusal()
    assert not started


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_taken_port_is_named(taken: int, flag: str, started: list[Any]) -> None:
    assert f"cannot bind 127.0.0.1:{taken}: Address already in use; choose another port" in refusal(flag, str(taken))
    assert started == []


def test_a_port_of_a_mesh_of_ours_can_be_freed(taken: int) -> None:
    with mesh_directory() as directory:
        write_record(directory, MeshRecord(1, taken, []))
        assert f"`tokenloom stop --port {taken}` stops your mesh there" in refusal("--port", str(taken))


def test_a_taken_port_for_metrics_is_named(taken: int, tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(f'[tokenizer]\nmetrics_listen = "127.0.0.1:{taken}"\n')
    message = refusal("--config", str(file))
    assert f"tokenizer: --metrics-listen 127.0.0.1:{taken}: Address already in use" in message
    assert "choose another address or port" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_parts_cannot_share_a_port(host: str) -> None:
    port = next(filter(_is_free, range(20_000, 30_000, 7)))
    flags = {"engine": (f"--metrics-listen=127.0.0.1:{port}",), "tokenizer": (f"--metrics-listen={host}:{port}",)}
    with pytest.raises(CannotServe, match="2 parts cannot listen on one port: use port 0"):
        check_addresses(flags, {"engine": 2})
    with pytest.raises(CannotServe, match="engine has the same port"):
        check_addresses(flags, {"engine": 1})


def test_a_part_cannot_have_the_unix_socket_of_a_process_that_listens(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    flags = {"engine": (f"--health-listen=unix:{path}",)}
    with (
        unix_socket.listen(path, 1),
        pytest.raises(CannotServe, match="a process listens there: choose another path"),
    ):
        check_addresses(flags, {"engine": 1})
    check_addresses(flags, {"engine": 1})  # of a killed process


def _is_free(port: int) -> bool:
    try:
        with reserved_ports("127.0.0.1", 2, port, None):
            return True
    except PortTaken:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(("option", "distance"), [("--port", 0), ("--grpc-port", 0), ("--port", 1000), ("--port", 1)])
def test_parts_cannot_have_a_port_of_the_gateways(option: str, distance: int, host: str, tmp_path: Path) -> None:
    free = next(filter(_is_free, range(20_000, 30_000, 7)))
    file = tmp_path / "mesh.toml"
    file.write_text(f'[coordinator]\nmetrics_listen = "{host}:{free + distance}"\n')
    message = refusal("--config", str(file), option, str(free), "--gateways", "2")
    assert f"coordinator: --metrics-listen {host}:{free + distance}: the gateway's --port or --grpc-port has" in message


def test_relays_have_ports_of_their_own(tmp_path: Path) -> None:
    free = next(filter(_is_free, range(20_000, 30_000, 7)))
    relays = ("--relays", "1", "--relay-grpc-port", str(free))
    message = refusal(*relays, "--port", str(free))
    owners = "the relay's --relay-port or --relay-grpc-port and the gateway's --port or --grpc-port"
    assert f"{owners} name one port (127.0.0.1:{free})" in message
    file = tmp_path / "mesh.toml"
    file.write_text(f'[coordinator]\nmetrics_listen = "127.0.0.1:{free}"\n')
    message = refusal("--config", str(file), "--port", "0", *relays)
    assert "the relay's --relay-port or --relay-grpc-port has the same port" in message


@pytest.mark.parametrize(
    ("service", "options"),
    [
        ("tokenizer", ("--also", "second=tokenloom-demo")),
        ("output_processor", ("--also", "second=tokenloom-demo")),
        ("engine", ("--also", "second=tokenloom-demo")),
        ("coordinator", ("--also", "second=tokenloom-demo")),
        ("coordinator", ("--coordinators", "2")),
        ("engine", ("--prefill", "1", "--decode", "1")),
    ],
)
def test_every_part_that_would_listen_is_counted(service: str, options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(f'[{service}]\nmetrics_listen = "127.0.0.1:9100"\n')
    assert "2 parts cannot listen on one port" in refusal("--config", str(file), *options)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--drain-timeout", "100000"), "--drain-timeout"),
        (("--drain-timeout", "nan"), "must be a number"),
        (("--request-timeout", "inf"), "must be a number > 0, not 'inf'"),
        (("--long-prefill-token-threshold", "-1"), "must be"),
        (("--max-connections", "8", "--operator-tls-cert", "/dev/null"), "gateway: "),
    ],
)
def test_what_a_part_would_refuse_is_refused_before_it_starts(
    options: tuple[str, ...], wanted: str, started: list[Any]
) -> None:
    result = run(*options)
    assert (result.exit_code, started) == (2, [])
    assert wanted in result.stderr


@pytest.mark.parametrize(
    ("option", "text", "wanted"),
    [
        ("--cache-salt-secret-file", "", "at least 16 bytes, not 0"),
        ("--api-key-file", "no digest", "api_key_file: line 1 is not the hex SHA-256 of a key"),
        ("--admin-api-key-file", "no digest", "admin_api_key_file: line 1 is not the hex SHA-256 of a key"),
        ("--api-key-file", "[[tenant]]\n", "api_key_file: tenant 1"),
    ],
)
def test_a_file_of_keys_that_the_gateway_would_refuse(option: str, text: str, wanted: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    assert wanted in refusal(option, str(file))


@pytest.mark.parametrize("option", ["--max-model-len", "--public-tls-cert", "--api-key-file", "--grpc-port"])
def test_none_is_the_default(option: str, started: list[Any]) -> None:
    result = run(option, "none")
    assert result.exit_code == 0, result.output
    assert len(started) == 1


def test_variables_that_no_mesh_reads_are_named(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLOOM_TLS_CERT", "/secret/place")
    result = run()
    assert result.exit_code == 0
    assert "Warning: TOKENLOOM_TLS_CERT is not read: " in result.stderr
    assert "/secret/place" not in result.stderr


@pytest.mark.parametrize("option", ["--api-key-file", "--public-tls-key"])
def test_a_missing_file_is_named(option: str, tmp_path: Path) -> None:
    message = refusal(option, str(tmp_path / "nothing"))
    assert f"{option}: {tmp_path}/nothing cannot be read (No such file or directory)" in message


@pytest.mark.parametrize("option", ["--batch-dir", "--request-record-dir"])
@pytest.mark.parametrize("place", ["/dev/null/batches", "/dev/null"])
def test_a_directory_that_cannot_be_made_is_named(option: str, place: str) -> None:
    assert f"{option}: {place} cannot be used, because /dev/null is no directory" in refusal(option, place)


@pytest.mark.parametrize("option", ["--api-key-file", "--public-tls-key", "--batch-dir"])
@pytest.mark.parametrize("name", ["~nosuch/key", "a" * 300])
def test_a_strange_name_of_a_file_is_one_line(option: str, name: str, started: list[Any], tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        result = run(option, name)
    assert (result.exit_code, len(result.stderr.splitlines())) in ((0, 0), (2, 1)), result.output


@pytest.mark.parametrize("model", ["~nosuch", "~nosuch/model.gguf", "a" * 300, f"{'a' * 300}/b", "org/name"])
def test_a_strange_name_of_a_model_is_one_line(model: str) -> None:
    assert refusal(model).startswith("Error: ")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    check_certificate(tmp_path / "gateway.crt", tmp_path / "gateway.key")
    with pytest.raises(CannotServe, match="are not a certificate and its key in PEM"):
        check_certificate(tmp_path / "gateway.crt", tmp_path / "engine.key")


def test_a_long_directory_for_sockets_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    with pytest.raises(CannotServe, match=r"too long for unix sockets.*set XDG_RUNTIME_DIR or TMPDIR"):
        check_run_directory(long)


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.preflight.host._NEEDED_BYTES", 1 << 62)
    with pytest.raises(CannotServe, match="free space, or set XDG_RUNTIME_DIR"):
        check_run_directory(Path("/tmp"))


def test_without_the_engines_packages_the_answer_is_what_to_install(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    found = host.find_spec
    monkeypatch.setattr(host, "find_spec", lambda name: None if name == "torch" else found(name))
    message = refusal()
    assert "needs torch, which this environment lacks: run pip install 'tokenloom[engine]'" in message
    assert run("--worker", "hash").exit_code == 0, "it needs no torch"
    assert len(started) == 1


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("2.10.1", "older than 2.11"), ("2.13.0+cpu", ""), ("2.14.0", r"tested with \(below 2.14\)"), ("2.11.0a1", "")],
)
def test_versions_of_torch(installed: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.metadata, "version", lambda name: installed)
    monkeypatch.setattr(host.metadata, "requires", lambda name: ["numpy>=1", 'torch<2.14,>=2.11; extra == "engine"'])
    if not reason:
        host.check_engine_packages()
        return
    with pytest.raises(CannotServe, match=reason):
        host.check_engine_packages()


@pytest.mark.parametrize(
    ("system", "machine", "note"),
    [("linux", "x86_64", ""), ("linux", "aarch64", "not tested"), ("darwin", "arm64", "not a tested platform")],
)
def test_other_platforms_get_one_sentence(
    system: str, machine: str, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.sys, "platform", system)
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    assert note in host.platform_note()
    assert bool(host.platform_note()) == bool(note)
