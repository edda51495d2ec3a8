"""Mutual TLS inside the mesh. A part is who its certificate says, wherever it listens: ``engine.tokenloom.internal`` is
an engine's, so certificates hold no host names and need no change when a pod moves."""

import asyncio
import logging
import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import grpc

from tokenloom.request.errors import InvalidArgument

log = logging.getLogger(__name__)

DOMAIN = "tokenloom.internal"
WAIT_SECONDS = 60.0
"""How long a part waits at its start for files that somebody else is making."""
_POLL_SECONDS = 0.2


def dns_name(service: str) -> str:
    """What the certificate of a service (or of an ``operator``, or ``prometheus``) names as its subject."""
    return f"{service.replace('_', '-')}.{DOMAIN}"


def service_of(names: Iterable[str]) -> str | None:
    """The service that a certificate with these names is of; None: of no part of a mesh."""
    for name in names:
        service, dot, domain = name.partition(".")
        if dot and domain == DOMAIN:
            return service.replace("-", "_")
    return None


@dataclass(frozen=True)
class CertificateFiles:
    """Where a part's certificate is, in PEM."""

    ca: Path
    """Of the authority that signed everybody's."""
    cert: Path
    key: Path

    async def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Returns once all files are there. Raises ``InvalidArgument`` naming the one that does not come."""
        for path in (self.ca, self.cert, self.key):
            if not path.exists():
                log.info("waiting for the certificate file %s", path)
            deadline = time.monotonic() + seconds
            while not path.exists():
                if time.monotonic() > deadline:
                    raise InvalidArgument(f"there is no certificate file {path}", "tls_cert")
                await asyncio.sleep(_POLL_SECONDS)


class MeshTLS:
    """Both directions of a part's connections, from its certificate. Files are read once: a new certificate takes a
    restart, as a rolling upgrade does."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises ``InvalidArgument`` for files that cannot be read or do not belong together."""
        self._files = files
        try:
            self._ca, self._cert, self._key = (path.read_bytes() for path in (files.ca, files.cert, files.key))
            self.server_context()
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"tls: {files.cert.name}, {files.key.name} and {files.ca.name} cannot be used: {error}", "tls_cert"
            ) from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server that talks only to who has a certificate of the same authority."""
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)], root_certificates=self._ca, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that shows our certificate."""
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def server_context(self) -> ssl.SSLContext:
        """For sockets without gRPC."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For sockets without gRPC; connections name the service that they expect (:func:`dns_name`)."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.cert, self._files.key)
        context.load_verify_locations(self._files.ca)
        return context


def public_credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    """For the public edge: clients know us, we know them by their keys. Raises ``InvalidArgument``."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except (OSError, ssl.SSLError) as error:
        message = f"public_tls_cert: {cert.name} and {key.name} cannot be used: {error}"
        raise InvalidArgument(message, "public_tls_cert") from None
