"""The listener of ``KVTransfer``: a port of its own, for engines only."""

import grpc.aio

from tokenloom.services.runtime.host.listener import SERVER_OPTIONS, bind
from tokenloom.services.runtime.host.servicer_edge import Edge
from tokenloom.services.runtime.peers.callers import check_caller
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.v1 import kv_transfer_pb2_grpc

from .kv_servicer import KVTransferServicer

MAX_CALLS = 4096
"""Calls at once: readings of long prompts have one open, and the renewals of others come between."""


class KVServer:
    """Binds when made. Raises ``InvalidArgument`` for an address that other machines can reach, ``Unavailable`` for one
    that cannot be had."""

    def __init__(self, listen: str, servicer: KVTransferServicer, tls: MeshTLS | None, *, insecure: bool) -> None:
        edge = Edge(check_caller if tls is not None else None)
        edge.add_servicer(kv_transfer_pb2_grpc.add_KVTransferServicer_to_server, servicer)
        self._server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((edge,))
        credentials = tls.server_credentials() if tls is not None else None
        self.address = bind(self._server, listen, credentials, insecure=insecure, field="kv_listen")

    async def start(self) -> None:
        """Answers from now on."""
        await self._server.start()

    async def close(self, grace: float) -> None:
        """Ends calls after ``grace`` seconds. Idempotent."""
        await self._server.stop(grace)
