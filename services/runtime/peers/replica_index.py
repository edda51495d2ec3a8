"""Follows the position of this process among those of its service, from which subsets are computed."""

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

import grpc
import grpc.aio

from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc

from .subset import ReplicaPosition

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.2
_OLD_COORDINATOR_SECONDS = 10.0
"""Until a coordinator is asked again that does not know the call: it is replaced during an update of the mesh."""


class ReplicaIndex:
    """Enrolls this process with the coordinator. While the coordinator is away, the last position stays.

    Attributes:
        position: None until the coordinator has sent it; the process then works with all members.
    """

    def __init__(self, service: str, instance_id: str) -> None:
        self._request = coordinator_pb2.EnrollRequest(service=service, instance_id=instance_id)
        self.position: ReplicaPosition | None = None

    async def run(
        self, stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", moved: Callable[[], object] = lambda: None
    ) -> NoReturn:
        """Stay enrolled until cancelled. ``moved``: called when the position has changed."""
        while True:
            call, wait = stub.Enroll(self._request), _AGAIN_SECONDS
            try:
                while isinstance(message := await call.read(), coordinator_pb2.Position):
                    if message.count and (position := ReplicaPosition(message.index, message.count)) != self.position:
                        self.position = position
                        moved()
            except grpc.aio.AioRpcError as error:
                log.debug("enrolment: %s", error.code().name)
                # During a rolling update the coordinator may be of the release before; all members are then used, as in
                # that release.
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    wait = _OLD_COORDINATOR_SECONDS
            except Exception:  # of a position that cannot be: the last one stays
                log.exception("a position of the coordinator cannot be taken")
            finally:
                call.cancel()
            await asyncio.sleep(wait)
