"""A client that hangs up ends the work that is done for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .body import ClientDisconnected, Receive


@asynccontextmanager
async def until_disconnected(receive: Receive) -> AsyncIterator[None]:
    """Cancels the body when the client goes away, and raises :class:`ClientDisconnected` then.

    Enter it once the request's body is read: from then on ``receive`` has only the disconnect to tell.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect watch")
    try:
        yield
    except asyncio.CancelledError:
        # As in asyncio.timeout: swallow only the cancellation that is ours.
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        watcher.cancel()
