"""Mutual TLS inside the mesh. A certificate names a service, such as ``engine.tokenloom.internal``, and no host: it
stays valid when a pod moves."""

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
"""How long a service waits at its start for files that another process is making."""
_POLL_SECONDS = 0.2


def dns_name(service: str) -> str:
    """Return the name in the certificate of a service, of an ``operator`` or of ``prometheus``."""
    return f"{service.replace('_', '-')}.{DOMAIN}"


def service_of(names: Iterable[str]) -> str | None:
    """Return the service that these names of a certificate belong to; None for a certificate from outside the mesh."""
    for name in names:
        service, dot, domain = name.partition(".")
        if dot and domain == DOMAIN:
            return service.replace("-", "_")
    return None


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of a service's certificate and key, in PEM. ``ca`` signed the certificates of the whole mesh."""

    ca: Path
    cert: Path
    key: Path

    async def wait(self, seconds: float = WAIT_SECONDS) -> None:
        """Return once all files exist. Raises ``InvalidArgument`` naming the one that does not appear."""
        for path in (self.ca, self.cert, self.key):
            if not path.exists():
                log.info("waiting for the certificate file %s", path)
            deadline = time.monotonic() + seconds
            while not path.exists():
                if time.monotonic() > deadline:
                    raise InvalidArgument(f"the certificate file {path} does not exist", "tls_cert")
                await asyncio.sleep(_POLL_SECONDS)


class MeshTLS:
    """Makes a service's TLS contexts, for both directions, from its certificate. Files are read once: a new certificate
    needs a restart."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises ``InvalidArgument`` for files that cannot be read or do not match."""
        self._files = files
        try:
            self._ca, self._cert, self._key = (path.read_bytes() for path in (files.ca, files.cert, files.key))
            self.server_context()
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"tls: {files.cert.name}, {files.key.name} and {files.ca.name} cannot be used: {error}", "tls_cert"
            ) from None

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server whose clients need a certificate of the same authority."""
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)], root_certificates=self._ca, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of a channel that presents our certificate."""
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server without gRPC."""
        context = self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return the context of a client without gRPC; connections name the service they expect (:func:`dns_name`)."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._files.cert, self._files.key)
        context.load_verify_locations(self._files.ca)
        return context


def public_credentials(cert: Path, key: Path) -> grpc.ServerCredentials:
    """Return server-only TLS for the public edge, whose clients have API keys. Raises ``InvalidArgument``."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    except (OSError, ssl.SSLError) as error:
        message = f"public_tls_cert: {cert.name} and {key.name} cannot be used: {error}"
        raise InvalidArgument(message, "public_tls_cert") from None
