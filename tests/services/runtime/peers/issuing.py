"""Authorities and certificates with names that `tokenloom certs` does not make."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tokenloom.services.runtime.peers.certificate_files import CertificateFiles

NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)


@dataclass(frozen=True)
class Issued:
    """A certificate with its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def authority(name: str = "authority") -> Issued:
    """Return an authority of its own."""
    return _issue(name, (), None, 30)


def issue(issuer: Issued, *names: x509.GeneralName, days: float = 30) -> Issued:
    """Return a certificate with these subject alternative names."""
    return _issue("leaf", names, issuer, days)


def write(folder: Path, issuer: Issued, issued: Issued) -> CertificateFiles:
    """Write or replace the three files of a part."""
    files = CertificateFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    folder.mkdir(exist_ok=True)
    pem = serialization.Encoding.PEM
    assert files.ca is not None
    files.ca.write_bytes(issuer.cert.public_bytes(pem))
    files.cert.write_bytes(issued.cert.public_bytes(pem))
    plain = serialization.NoEncryption()
    files.key.write_bytes(issued.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return files


def _issue(name: str, names: Sequence[x509.GeneralName], issuer: Issued | None, days: float) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.cert.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(hours=1))
        .not_valid_after(NOW + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return Issued(builder.sign(key if issuer is None else issuer.key, hashes.SHA256()), key)
