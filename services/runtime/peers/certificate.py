"""A certificate and its key as their files hold them now: changed files are read again, without a restart."""

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.request.errors import InvalidArgument

from .certificate_files import CertificateFiles

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How often the files are looked at, at most; each use of a certificate may look."""
WAIT_SECONDS = 60.0
"""How long a service waits at its start for files that another process is making."""
_POLL_SECONDS = 0.2


async def wait_for_files(files: CertificateFiles, seconds: float = WAIT_SECONDS) -> None:
    """Return once all files exist. Raises ``InvalidArgument`` naming the one that does not appear."""
    for path in files.paths:
        if not path.exists():
            log.info("waiting for the certificate file %s", path)
        deadline = time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise InvalidArgument(f"the certificate file {path} does not exist", files.field)
            await asyncio.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class Loaded:
    """Holds the content of the files, which was checked to fit together.

    Attributes:
        generation: Counts the changes of the files, from 0.
        ca: PEM; empty when peers need no certificate.
        cert, key: PEM; the certificate may be a chain.
        server, client: Contexts of connections without gRPC.
    """

    generation: int
    ca: bytes
    cert: bytes
    key: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext

    def expiry(self) -> float:
        """Return when the first certificate of the chain expires, as a Unix time in seconds."""
        return _expiry(self.cert)

    def ca_expiry(self) -> float:
        """Return the same for the authority: with a bundle, the time of the last one to expire."""
        return _expiry(self.ca, last=True)


class Certificate:
    """Reads the files when they have changed. Files that cannot be used leave the previous certificate in place, so
    that a file that is only half replaced does no harm. May be used by any thread."""

    def __init__(self, files: CertificateFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ``InvalidArgument`` for files that cannot be read or do not match."""
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._checked = clock()
        self._failure = ""
        try:
            self._seen = signature(files.paths)
            self._loaded = _load(files, generation=0)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{files.field}: {files.names} cannot be used: {error}", files.field) from None

    def current(self) -> Loaded:
        """Return what the files hold, as of at most ``CHECK_SECONDS`` ago."""
        with self._lock:
            now = self._clock()
            # Uses of the certificate look at the files, instead of a timer or a thread: comparing them takes 20 µs, at
            # most once a second, and a stream's frames pay nothing.
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now
                self._check()
            return self._loaded

    def server_context(self) -> ssl.SSLContext:
        """Return a context for a server; each handshake uses what the files hold at that time."""
        context = _server_context(self._files)

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            # An SSLContext cannot forget an authority, so a changed one needs a new context, and this callback is the
            # only place in a handshake where it can be exchanged.
            connection.context = self.current().server

        # OpenSSL calls this in every handshake, whether or not the client names a server.
        context.sni_callback = renew
        return context

    def _check(self) -> None:
        files = self._files
        try:
            seen = signature(files.paths)
            if seen == self._seen:
                self._recover()  # one that could not be read may be back as it was
                return
            loaded = _load(files, self._loaded.generation + 1)
            # Certificate and key are two files: read between the two writes they do not match, or, worse, match an old
            # authority.
            if signature(files.paths) != seen:
                return  # the files are being replaced now
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                self._failure = str(error)
                OF_PROCESS.begin("old_certificate", f"{files.names}: {error}", files.names)
            return
        self._seen, self._loaded = seen, loaded
        self._recover()
        log.info("read a new certificate from %s", files.names)

    def _recover(self) -> None:
        if self._failure:
            self._failure = ""
            OF_PROCESS.end("old_certificate", self._files.names)


def signature(paths: Iterable[Path]) -> tuple[tuple[int, int, int], ...]:
    """Return what changes when a file is written or replaced, also through a link as in Kubernetes' volumes.

    Raises ``OSError`` for a file that is not there.
    """
    stats = (path.stat() for path in paths)
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _load(files: CertificateFiles, generation: int) -> Loaded:
    """Raises ``OSError`` (``ssl.SSLError`` included) or ``ValueError`` for files that cannot be used."""
    server = _server_context(files)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Only DNS names among the alternative names identify a part; the common name is free text that no authority checks.
    client.hostname_checks_common_name = False
    _fill(client, files)
    cert, key = files.cert.read_bytes(), files.key.read_bytes()
    loaded = Loaded(generation, b"" if files.ca is None else files.ca.read_bytes(), cert, key, server, client)
    loaded.expiry()  # raises for a file that metrics could not read
    return loaded


def _server_context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would skip the check of the client's certificate.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    _fill(context, files)
    return context


def _fill(context: ssl.SSLContext, files: CertificateFiles) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.cert, files.key)
    if files.ca is not None:
        context.load_verify_locations(files.ca)


def _expiry(pem: bytes, *, last: bool = False) -> float:
    from cryptography import x509  # imported here: only a process with certificates needs it

    times = [each.not_valid_after_utc.timestamp() for each in x509.load_pem_x509_certificates(pem)]
    return max(times) if last else min(times)
