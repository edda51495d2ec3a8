"""Follows the coordinator's registry, for all who need to know the engines."""

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

import grpc.aio

from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import Snapshot, WatchRequest

from .registry_view import RegistryView

log = logging.getLogger(__name__)

REWATCH_SECONDS = 0.2


async def watch_registry(
    stub: "coordinator_pb2_grpc.CoordinatorAsyncStub",
    taken: Callable[[RegistryView], None],
    lost: Callable[[str], None] | None = None,
    *,
    without_loads: bool = False,
) -> NoReturn:
    """Watch, and watch again whenever the stream ends, until cancelled.

    Args:
        taken: Called after each message with the view; every stream begins a new one.
        lost: Called when a stream has ended, with the reason, for a log.
        without_loads: Whether only engines, their states and roles matter.
    """
    request = WatchRequest(changes=True, without_loads=without_loads)
    while True:
        # A new view for each stream: the first message of a stream is whole, and a change of the old stream must not be
        # applied to it. The old view stays in use until that message has come.
        call, view, reason = stub.Watch(request), RegistryView(), "the stream ended"
        try:
            while isinstance(message := await call.read(), Snapshot):
                if not view.take(message):
                    reason = f"a change is missing after revision {view.revision}"
                    break
                taken(view)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name} {error.details()}"
        except Exception:  # of a message that cannot be: the next stream begins with a whole one
            log.exception("a message of the coordinator cannot be taken")
            reason = "a message could not be taken"
        finally:
            call.cancel()
        log.debug("coordinator: %s", reason)
        if lost is not None:
            lost(reason)
        await asyncio.sleep(REWATCH_SECONDS)
