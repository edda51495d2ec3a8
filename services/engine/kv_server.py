"""The listener of ``KVTransfer``: a port of its own, for engines only."""

import grpc.aio

from tokenloom.v1 import kv_transfer_pb2_grpc

from ..runtime import addresses
from ..runtime.edge import Edge
from ..runtime.errors import Unavailable
from ..runtime.host import SERVER_OPTIONS
from .kv_servicer import KVTransferServicer

MAX_CALLS = 4096
"""Calls at once: readings of long prompts have one open, and the renewals of others come between."""


class KVServer:
    """Binds when made. Raises ``InvalidArgument`` for an address that other machines can reach, ``Unavailable`` for one
    that cannot be had."""

    def __init__(self, listen: str, servicer: KVTransferServicer, *, insecure: bool) -> None:
        address = addresses.parse(listen, field="kv_listen")
        addresses.check_closed(address, insecure=insecure, field="kv_listen")
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=[Edge(lambda: True)], maximum_concurrent_rpcs=MAX_CALLS
        )
        kv_transfer_pb2_grpc.add_KVTransferServicer_to_server(servicer, self._server)
        try:
            port = self._server.add_insecure_port(str(address))
        except RuntimeError:
            raise Unavailable(f"kv_listen: cannot bind {address}; is it taken, or its folder missing?") from None
        self.address = str(address) if address.path else str(addresses.Address(host=address.host, port=port))

    async def start(self) -> None:
        """Answers from now on."""
        await self._server.start()

    async def close(self, grace: float) -> None:
        """Ends calls after ``grace`` seconds. Idempotent."""
        await self._server.stop(grace)
