"""Opens channels that wait longer for an answer to a ping than those of a real part."""

import grpc.aio

from tokenloom.services.runtime.peers.channels import CHANNEL_OPTIONS, COORDINATOR_OPTIONS, KEEPALIVE_OPTIONS, Channels

_SECONDS = 20
_TIMEOUTS = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")


class PatientChannels(Channels):
    """For processes that stand for hundreds of parts on a machine with few cores: each connection pings the coordinator
    as often as a real part's, but such a process may not run for longer than a real one is silent."""

    def open(self, address: str, service: str) -> grpc.aio.Channel:
        keepalive = [(name, _SECONDS * 1000 if name in _TIMEOUTS else value) for name, value in KEEPALIVE_OPTIONS]
        options = [*COORDINATOR_OPTIONS, *CHANNEL_OPTIONS, *keepalive, ("grpc.default_authority", "localhost")]
        return grpc.aio.insecure_channel(address, options=options)
