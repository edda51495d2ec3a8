"""Bounds of a gRPC server: connections, streams of each of them, calls in all, and the silence of clients."""

from dataclasses import dataclass

from . import descriptors

HANDSHAKE_SECONDS = 10.0
"""How long a connection may take until it speaks HTTP/2."""


@dataclass(frozen=True, slots=True)
class GrpcLimits:
    """Bounds one server. The defaults are for the parts of a mesh, which keep few connections and many calls.

    Attributes:
        connections: Open connections of a port; gRPC closes further ones when it accepts them. It knows no limit by
            address.
        streams: Open calls of a connection; clients keep further ones back.
        calls: Open calls of all connections; further ones end in RESOURCE_EXHAUSTED.
        is_patient: Whether clients may be silent for longer (see :func:`.patient_options`).
    """

    connections: int = 1024
    streams: int = 4096
    calls: int = 16384
    is_patient: bool = False

    def options(self) -> list[tuple[str, int]]:
        """Return the options of the server. It also needs ``maximum_concurrent_rpcs=calls``."""
        from ..peers.keepalive import patient_options  # here, because the help of a command needs settings only

        return [
            ("grpc.max_allowed_incoming_connections", descriptors.for_peers(self.connections)),
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
            *(patient_options() if self.is_patient else ()),
        ]


PROBES = GrpcLimits(connections=64, streams=64, calls=256)
"""For the port that answers health checks only."""
