"""Mutual TLS inside the mesh, and TLS for clients at its edge. A certificate of the mesh names a service, such as
``engine.tokenloom.internal``, and no host: it stays valid when a pod moves. Certificates are read again when their
files change: the next handshake uses the new one, established connections continue."""

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import cast

import grpc

from .certificate import Certificate, Loaded
from .certificate_files import CertificateFiles


def take_socket(transport: asyncio.BaseTransport) -> socket.socket:
    """Return the socket of a transport, which ends without the connection. To be called in ``connection_made``, before
    anything was read; the caller closes the socket or hands it to ``connect_accepted_socket``.

    ``start_tls`` is no alternative: it loses what the event loop has read before it is called, and uvloop reads a
    ClientHello that is there already as soon as ``connection_made`` has returned.
    """
    taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    taken.setblocking(False)
    cast(asyncio.Transport, transport).abort()
    return taken


class AcceptedSocket(asyncio.Protocol):
    """Hands on the socket of a connection before anything is read from it."""

    def __init__(self, accept: Callable[[socket.socket], None]) -> None:
        self._accept = accept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._accept(take_socket(transport))


class MeshTLS:
    """Makes a service's credentials, for both directions, from its certificate."""

    def __init__(self, files: CertificateFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ``InvalidArgument`` for files that cannot be read or do not match."""
        self._certificate = Certificate(files, clock)

    @property
    def generation(self) -> int:
        """Counts the changes of the certificate."""
        return self._certificate.current().generation

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server whose clients need a certificate of the same authority."""
        return _server_credentials(self._certificate)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of a channel that presents our certificate as it is now."""
        loaded = self._certificate.current()
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server without gRPC. It stays valid when the certificate changes."""
        return self._certificate.server_context()

    def client_context(self) -> ssl.SSLContext:
        """Return the context of one connection of a client without gRPC; the caller names the service that it expects
        (:func:`dns_name`)."""
        return self._certificate.current().client

    def expiry(self) -> float:
        """Return the Unix time at which our certificate expires."""
        return self._certificate.current().expiry()

    def ca_expiry(self) -> float:
        """Return the Unix time at which the authority's certificate expires."""
        return self._certificate.current().ca_expiry()


class PublicTLS:
    """Makes the credentials of the public edge, whose clients have API keys and no certificates."""

    def __init__(self, files: CertificateFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ``InvalidArgument`` for files that cannot be read or do not match."""
        self._certificate = Certificate(files, clock)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a gRPC server."""
        return _server_credentials(self._certificate)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of an HTTP server. It stays valid when the certificate changes."""
        return self._certificate.server_context()

    def expiry(self) -> float:
        """Return the Unix time at which the certificate expires."""
        return self._certificate.current().expiry()


def _server_credentials(certificate: Certificate) -> grpc.ServerCredentials:
    def configuration() -> grpc.ServerCertificateConfiguration:
        """Called by gRPC in every handshake, on a thread of its own."""
        return _configuration(certificate.current())

    loaded = certificate.current()
    return grpc.dynamic_ssl_server_credentials(_configuration(loaded), configuration, bool(loaded.ca))


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca or None)
