"""Certificates that are replaced while they are used."""

import datetime
import logging
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from tests.services.runtime.peers.issuing import NOW, authority, issue, write
from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers.certificate import CHECK_SECONDS, Certificate
from tokenloom.services.runtime.peers.certificate_files import CertificateFiles

ENGINE = x509.DNSName("engine.tokenloom.internal")
GATEWAY = x509.DNSName("gateway.tokenloom.internal")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def days_from_now(days: int) -> float:
    return (NOW + datetime.timedelta(days=days)).timestamp()


def test_a_changed_file_is_read_within_a_second(tmp_path: Path) -> None:
    clock, signer = Clock(), authority()
    certificate = Certificate(write(tmp_path, signer, issue(signer, ENGINE, days=5)), clock)
    assert certificate.current().expiry() == days_from_now(5)
    assert certificate.current().ca_expiry() == days_from_now(30)
    write(tmp_path, signer, issue(signer, ENGINE, days=20))
    assert certificate.current().generation == 0  # not every use looks at the files
    clock.now += CHECK_SECONDS
    assert certificate.current().generation == 1
    assert certificate.current().expiry() == days_from_now(20)
    clock.now += CHECK_SECONDS
    assert certificate.current().generation == 1


def test_half_replaced_files_leave_the_previous_certificate_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, signer = Clock(), authority()
    files = write(tmp_path, signer, issue(signer, ENGINE))
    certificate = Certificate(files, clock)
    before, key = certificate.current(), files.key.read_bytes()
    write(tmp_path, signer, issue(signer, ENGINE))
    after = files.key.read_bytes()
    files.key.write_bytes(key)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        clock.now += CHECK_SECONDS
        assert certificate.current() is before
    assert len(caplog.records) == 1
    assert "the previous one stays in use" in caplog.text
    assert "PRIVATE" not in caplog.text
    files.key.unlink()
    clock.now += CHECK_SECONDS
    assert certificate.current() is before
    files.key.write_bytes(after)
    clock.now += CHECK_SECONDS
    assert certificate.current().key == after


def test_a_file_that_is_back_as_it_was_ends_the_fall_back(tmp_path: Path) -> None:
    clock, signer = Clock(), authority()
    files = write(tmp_path, signer, issue(signer, ENGINE))
    certificate = Certificate(files, clock)
    for _ in range(2):
        files.cert.rename(tmp_path / "away")
        clock.now += CHECK_SECONDS
        assert certificate.current().generation == 0
        assert list(OF_PROCESS.of(files.names)) == ["old_certificate"]
        (tmp_path / "away").rename(files.cert)
        clock.now += CHECK_SECONDS
        assert certificate.current().generation == 0
        assert not OF_PROCESS.of(files.names)


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    signer = authority()
    files = write(tmp_path, signer, issue(signer, ENGINE))
    files.cert.write_text("no certificate")
    with pytest.raises(InvalidArgument, match=r"tls_cert: ca\.crt, tls\.crt and tls\.key cannot be used"):
        Certificate(files)
    with pytest.raises(InvalidArgument, match=r"^public_tls_cert: tls\.crt and tls\.key cannot be used"):
        Certificate(CertificateFiles(None, files.cert, files.key, "public_tls_cert"))


def test_each_handshake_uses_the_certificate_and_the_authority_of_its_time(tmp_path: Path) -> None:
    clock, old, new = Clock(), authority("old"), authority("new")
    server = Certificate(write(tmp_path / "server", old, issue(old, ENGINE)), clock)
    context = server.server_context()
    of_old = Certificate(write(tmp_path / "of_old", old, issue(old, GATEWAY))).current().client
    of_new = Certificate(write(tmp_path / "of_new", new, issue(new, GATEWAY))).current().client
    # Trusts both, but its own certificate is from the old authority.
    mixed = Certificate(write(tmp_path / "mixed", old, issue(old, GATEWAY))).current().client
    mixed.load_verify_locations(tmp_path / "of_new" / "ca.crt")
    assert issuer_seen(context, of_old) == "old"
    assert issuer_seen(context, of_new) is None
    assert issuer_seen(context, mixed) == "old"
    write(tmp_path / "server", new, issue(new, ENGINE))
    clock.now += CHECK_SECONDS
    assert issuer_seen(context, of_new) == "new"
    assert issuer_seen(context, of_old) is None
    assert issuer_seen(context, mixed) is None


def test_a_client_accepts_dns_names_only(tmp_path: Path) -> None:
    signer = authority()
    client = Certificate(write(tmp_path / "client", signer, issue(signer, GATEWAY))).current().client
    uri = issue(signer, x509.UniformResourceIdentifier("engine.tokenloom.internal"))
    server = Certificate(write(tmp_path / "server", signer, uri)).server_context()
    assert issuer_seen(server, client) is None


def issuer_seen(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Return the issuer's name in the server's certificate; None if one of the two refuses the other."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection = listener.accept()[0]
        try:
            with server.wrap_socket(connection, server_side=True) as secured:
                secured.sendall(b"!")
        except OSError:
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        plain = socket.create_connection(listener.getsockname())
        with plain, client.wrap_socket(plain, server_hostname="engine.tokenloom.internal") as secured:
            if not secured.recv(1):  # with TLS 1.3 a refused client learns it only when it reads
                return None
            names = dict(pair for group in (secured.getpeercert() or {})["issuer"] for pair in group)  # type: ignore[union-attr,misc]
            return str(names["commonName"])
    except OSError:
        return None
    finally:
        thread.join()
        listener.close()
