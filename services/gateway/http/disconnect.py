"""A client that hangs up ends the work that is done for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .body import ClientDisconnected
from .exchange import Exchange


@asynccontextmanager
async def until_disconnected(exchange: Exchange) -> AsyncIterator[None]:
    """Cancels the body when the client goes away, and raises :class:`ClientDisconnected` then.

    Enter it once the request's body is read: from then on ``receive`` has only the disconnect to tell.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    async def watch() -> None:
        while (await exchange.receive())["type"] != "http.disconnect":
            pass
        leave()

    watcher = None
    if exchange.direct is None:
        watcher = asyncio.create_task(watch(), name="disconnect watch")
    elif exchange.direct.is_disconnected:
        raise ClientDisconnected
    else:
        exchange.direct.watch(leave)
    try:
        yield
    except asyncio.CancelledError:
        # As in asyncio.timeout: swallow only the cancellation that is ours.
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from None
        raise
    finally:
        if watcher is not None:
            watcher.cancel()
        elif exchange.direct is not None:
            exchange.direct.unwatch(leave)
