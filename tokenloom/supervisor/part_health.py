"""Follows what the running parts of a local mesh say of themselves: whether they serve, and where."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.services.runtime.addresses import CHANGED_SUFFIX
from tokenloom.services.runtime.peers.channels import open_channel

from .state_dir import PartReport, read_part_state

_LOOK_SECONDS = 5.0
"""How often the file is read without a notice: a part without a descriptor for it sends none."""
_SERVING = health_pb2.HealthCheckResponse.SERVING


async def follow(state_file: Path, pid: int, report: Callable[[PartReport], None]) -> None:
    """Report what a process writes into its state file, now and at each change, until cancelled.

    Raises ``OSError`` if the system has no descriptor for that.
    """
    # Not by calls of gRPC, whose runtime would take eight threads of the supervisor.
    with _notices(state_file) as notices:
        loop = asyncio.get_running_loop()
        while True:
            state = read_part_state(state_file)
            if state is not None and state.pid == pid:
                report(state)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await loop.sock_recv(notices, 1)


@contextlib.contextmanager
def _notices(state_file: Path) -> Iterator[socket.socket]:
    """Open the socket that gets an empty datagram whenever the state file has changed."""
    path = state_file.with_suffix(CHANGED_SUFFIX)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.setblocking(False)
        notices.bind(str(path))
        try:
            yield notices
        finally:
            path.unlink(missing_ok=True)


async def is_serving(address: str, timeout: float = 1.0) -> bool:
    """Return whether the part is SERVING; a part that does not answer within `timeout` seconds is not."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == _SERVING)
