"""Makes a certificate authority for development, and a certificate for each part of a mesh."""

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tokenloom.services.runtime.peers.callers import OPERATOR, PLANNER
from tokenloom.services.runtime.peers.certificate_files import dns_name

PARTS = (
    *("gateway", "tokenizer", "output_processor", "coordinator", "engine", "encoder", "relay"),
    *(OPERATOR, PLANNER, "prometheus"),
)
"""The owners of certificates: the services, the operator of the mesh, the planner, and Prometheus."""
_RENEW_BEFORE = datetime.timedelta(days=7)
_CLOCK_SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Pair:
    """Holds a certificate with its key."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, cert: Path, key: Path) -> "Pair | None":
        """Return the pair; None if it is missing or about to expire. Raises ``ValueError`` for other files."""
        if not cert.exists() or not key.exists():
            return None
        try:
            loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a password
            raise ValueError(f"{key} is no key that this command made") from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key} is no key that this command made")
        try:
            pair = cls(x509.load_pem_x509_certificate(cert.read_bytes()), loaded)
        except ValueError:
            raise ValueError(f"{cert} is no certificate in PEM") from None
        return pair if pair.cert.not_valid_after_utc - _now() > _RENEW_BEFORE else None

    def save(self, cert: Path, key: Path) -> None:
        """Write the key, readable by its owner only, and then the certificate: a part that waits for it finds both."""
        pem = serialization.Encoding.PEM
        private = self.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_file(key, private, 0o600)
        write_file(cert, self.cert.public_bytes(pem), 0o644)


def make_certificates(folder: Path, *, days: int, group_readable: bool = False) -> list[Path]:
    """Write ``ca.crt``, ``ca.key`` and ``<part>.crt``, ``<part>.key`` for each part; return the written paths.

    Files that are valid for another week are kept, so that a second call changes nothing.

    Args:
        group_readable: Let the folder's group read the keys, for containers that run as another user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lifetime = datetime.timedelta(days=days)
    written: list[Path] = []
    paths = folder / "ca.crt", folder / "ca.key"
    authority = Pair.load(*paths)
    renewed = authority is None
    if authority is None:
        authority = _make_authority(lifetime)
        authority.save(*paths)
        written += paths
    for part in PARTS:
        name = part.replace("_", "-")
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        if renewed or Pair.load(*paths) is None:
            _issue(authority, part, lifetime).save(*paths)
            written += paths
        if group_readable:  # for kept keys too: an earlier call may have been without it
            paths[1].chmod(0o640)
    return written


def make_separate_certificates(folder: Path, *, days: int) -> list[Path]:
    """Write ``<part>/ca.crt``, ``<part>/tls.crt`` and ``<part>/tls.key`` for each part; return the written paths.

    Each part's folder can be mounted for that part alone. The authority's key is never written: while all certificates
    are valid for another week, nothing changes; after that, a new authority signs new ones for all parts.
    """
    # For containers: one folder with all keys and ca.key was mounted into each of them, so that an intruder in one
    # part had every identity. Now a part has its own only, and nothing more can be signed by the old authority.
    folders = {part: folder / part.replace("_", "-") for part in PARTS}
    if all(_is_signed(each) for each in folders.values()):
        return []
    lifetime = datetime.timedelta(days=days)
    authority = _make_authority(lifetime)
    written: list[Path] = []
    for part, own in folders.items():
        own.mkdir(parents=True, exist_ok=True)
        paths = own / "ca.crt", own / "tls.key", own / "tls.crt"
        write_file(paths[0], authority.cert.public_bytes(serialization.Encoding.PEM), 0o644)
        _issue(authority, part, lifetime).save(paths[2], paths[1])
        written += paths
    return written


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write the file atomically, never readable by more than ``mode`` says; to a pipe or a device, write directly.

    A link is followed. Raises ``OSError``; a regular file keeps its old content then.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # What a killed process of this number left would keep its mode, and a link would lead elsewhere.
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _is_signed(folder: Path) -> bool:
    """Return whether the folder holds a certificate that is valid for another week, and its authority's."""
    pair, authority = Pair.load(folder / "tls.crt", folder / "tls.key"), folder / "ca.crt"
    if pair is None or not authority.exists():
        return False
    try:
        pair.cert.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except (InvalidSignature, ValueError):  # a run was ended while it replaced the files
        return False
    return True


def _make_authority(lifetime: datetime.timedelta) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tokenloom development CA")])
    builder = _builder(name, name, key.public_key(), lifetime)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return Pair(builder.sign(key, hashes.SHA256()), key)


def _issue(authority: Pair, part: str, lifetime: datetime.timedelta) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = dns_name(part)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, authority.cert.subject, key.public_key(), lifetime)
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    # The name of a service and of no host: pods move, and a certificate that names an address would have to be made
    # anew.
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(both, critical=False).add_extension(issuer, critical=False)
    return Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
