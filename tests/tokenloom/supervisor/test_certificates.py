"""The development CA and what it signs."""

import base64
import os
import stat
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.supervisor.certificates import PARTS, Pair, make_certificates, make_separate_certificates


def test_every_part_has_a_certificate_of_its_name(tmp_path: Path) -> None:
    written = make_certificates(tmp_path, days=30)
    assert len(written) == 2 + 2 * len(PARTS)
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    for part in PARTS:
        name = part.replace("_", "-")
        cert = x509.load_pem_x509_certificate((tmp_path / f"{name}.crt").read_bytes())
        cert.verify_directly_issued_by(authority)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [f"{name}.tokenloom.internal"]
        assert stat.S_IMODE((tmp_path / f"{name}.key").stat().st_mode) == 0o600


def test_a_second_call_changes_nothing(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert make_certificates(tmp_path, days=30) == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_second_call_lets_the_group_read_keys_that_exist(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    assert make_certificates(tmp_path, days=30, group_readable=True) == []
    keys = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.key")}
    assert keys == {path.name: 0o600 if path.name == "ca.key" else 0o640 for path in tmp_path.glob("*.key")}


def test_a_draft_that_a_killed_run_left_does_not_decide_who_reads_the_key(tmp_path: Path) -> None:
    draft = tmp_path / f".engine.key.{os.getpid()}"
    draft.touch(mode=0o644)
    make_certificates(tmp_path, days=30)
    assert stat.S_IMODE((tmp_path / "engine.key").stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".*"))


def test_what_is_lost_or_about_to_expire_is_made_anew(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    (tmp_path / "engine.key").unlink()
    assert make_certificates(tmp_path, days=30) == [tmp_path / "engine.crt", tmp_path / "engine.key"]
    make_certificates(tmp_path / "short", days=6)
    assert Pair.load(tmp_path / "short" / "engine.crt", tmp_path / "short" / "engine.key") is None


def test_each_part_gets_a_folder_and_the_authoritys_key_is_kept_nowhere(tmp_path: Path) -> None:
    assert len(make_separate_certificates(tmp_path, days=30)) == 3 * len(PARTS)
    assert not list(tmp_path.rglob("ca.key"))
    for part in PARTS:
        folder = tmp_path / part.replace("_", "-")
        authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        cert = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
        cert.verify_directly_issued_by(authority)
        assert stat.S_IMODE((folder / "tls.key").stat().st_mode) == 0o600
        MeshTLS(CertificateFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key"))


def test_separate_certificates_are_replaced_together(tmp_path: Path) -> None:
    make_separate_certificates(tmp_path, days=30)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert make_separate_certificates(tmp_path, days=30) == []
    # As after a run that was ended half-way: the engine has another authority than its certificate.
    make_separate_certificates(tmp_path / "other", days=30)
    (tmp_path / "engine/ca.crt").write_bytes((tmp_path / "other/engine/ca.crt").read_bytes())
    assert len(make_separate_certificates(tmp_path, days=30)) == 3 * len(PARTS)
    assert all(path.read_bytes() != content for path, content in before.items())
    assert len({path.read_bytes() for path in tmp_path.glob("*/ca.crt")}) == 1
    make_separate_certificates(tmp_path / "short", days=6)
    assert len(make_separate_certificates(tmp_path / "short", days=30)) == 3 * len(PARTS)


@pytest.mark.parametrize(
    ("options", "namespace"), [([], "tokenloom"), (["--namespace", "other"], "other"), (["--by-part"], "tokenloom")]
)
def test_secrets_for_kubernetes(tmp_path: Path, options: list[str], namespace: str) -> None:
    path, folder = tmp_path / "secrets.yaml", tmp_path / "certs"
    result = CliRunner().invoke(app, ["certs", str(folder), "--kubernetes", str(path), *options])
    assert result.exit_code == 0, result.output
    by_part = "--by-part" in options
    assert ("do not copy it" in result.output) == (not by_part)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secrets = {each["metadata"]["name"]: each for each in yaml.safe_load_all(path.read_text())}
    assert secrets.keys() == {f"tokenloom-{part.replace('_', '-')}-tls" for part in PARTS}
    for name, secret in secrets.items():
        part = name.removeprefix("tokenloom-").removesuffix("-tls")
        assert secret["metadata"]["namespace"] == namespace
        assert secret["data"].keys() == {"ca.crt", "tls.crt", "tls.key"}
        key = folder / part / "tls.key" if by_part else folder / f"{part}.key"
        assert base64.b64decode(secret["data"]["tls.key"]) == key.read_bytes()


def test_secrets_are_private_in_a_file_that_others_could_read(tmp_path: Path) -> None:
    path = tmp_path / "secrets.yaml"
    path.write_text("old")
    path.chmod(0o644)
    with path.open() as reader:
        result = CliRunner().invoke(app, ["certs", str(tmp_path / "certs"), "--kubernetes", str(path)])
        assert result.exit_code == 0, result.output
        assert reader.read() == "old", "a process that had the file open reads the keys"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(list(yaml.safe_load_all(path.read_text()))) == len(PARTS)


def test_secrets_go_through_a_link_and_to_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    certs = str(tmp_path / "certs")
    assert CliRunner().invoke(app, ["certs", certs, "--kubernetes", str(tmp_path / "link")]).exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb") as file:
        assert CliRunner().invoke(app, ["certs", certs, "--kubernetes", str(pipe)]).exit_code == 0
        assert file.read() == (tmp_path / "real").read_bytes()
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["ca.key", "ca.crt", "engine.key", "engine.crt"])
@pytest.mark.parametrize("content", [b"garbage", b"", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----\nx\n"])
def test_a_folder_with_other_files_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    make_certificates(tmp_path, days=30)
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["certs", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path / name} is no ")
    assert result.stderr.count("\n") == 1
