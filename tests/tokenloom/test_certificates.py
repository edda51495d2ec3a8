"""The development CA and what it signs."""

import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from tokenloom.certificates import PARTS, Pair, make_certificates
from tokenloom.cli.main import app


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


def test_what_is_lost_or_about_to_expire_is_made_anew(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=30)
    (tmp_path / "engine.key").unlink()
    assert make_certificates(tmp_path, days=30) == [tmp_path / "engine.crt", tmp_path / "engine.key"]
    make_certificates(tmp_path / "short", days=6)
    assert Pair.load(tmp_path / "short" / "engine.crt", tmp_path / "short" / "engine.key") is None


@pytest.mark.parametrize("namespace", ["tokenloom", "other"])
def test_secrets_for_kubernetes(tmp_path: Path, namespace: str) -> None:
    secrets = tmp_path / "secrets.yaml"
    arguments = ["certs", str(tmp_path / "certs"), "--kubernetes", str(secrets), "--namespace", namespace]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "do not copy it" in result.output
    text = secrets.read_text()
    assert text.count('"kind": "Secret"') == len(PARTS)
    assert f'"namespace": "{namespace}"' in text
    assert "tokenloom-output-processor-tls" in text
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
