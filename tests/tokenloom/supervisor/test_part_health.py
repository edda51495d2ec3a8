"""Engines say how many tokens a request may have."""

from pathlib import Path

import grpc.aio

from tokenloom.supervisor.part_health import context_length
from tokenloom.v1 import engine_pb2, engine_pb2_grpc


class Admin(engine_pb2_grpc.EngineAdminServicer):
    def __init__(self, length: int) -> None:
        self._length = length

    async def GetEngineInfo(self, request, context):  # type: ignore[no-untyped-def]
        return engine_pb2.GetEngineInfoResponse(max_model_len=self._length)


async def test_the_smallest_context_of_those_that_answer_counts(socket_dir: Path) -> None:
    addresses, servers = [], []
    for length in (4096, 2048):
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineAdminServicer_to_server(Admin(length), server)  # type: ignore[no-untyped-call]
        addresses.append(f"unix:{socket_dir}/{length}.sock")
        server.add_insecure_port(addresses[-1])
        await server.start()
        servers.append(server)
    assert await context_length([*addresses, f"unix:{socket_dir}/nothing.sock"]) == 2048
    assert await context_length([]) is None
    for server in servers:
        await server.stop(None)
