"""Bounds how long clients from outside the mesh keep calls open that say nothing: a server has a limit of open calls.

A method whose requests are a stream bounds its clients' silence itself, because it knows how long a session may wait.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit

MESSAGE_SECONDS = 60.0
"""Limit on the time from the beginning of a call to the end of its only message, as for the body of an HTTP request."""
WATCH = "/grpc.health.v1.Health/Watch"
"""Stays open as long as its caller likes, who needs no credentials."""
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
"""Its requests are a stream, and it is a library's."""
_WATCH_SHARE = 4


async def only_message(requests: AsyncIterator[Any]) -> Any:
    """Return the message of a call that has one. gRPC itself would wait for it without a limit.

    Raises ``DeadlineExceeded`` when it does not arrive, ``InvalidArgument`` when there is none.
    """
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(requests)
    except StopAsyncIteration:
        raise errors.InvalidArgument("the call has ended without a message") from None
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the call's message did not arrive within {MESSAGE_SECONDS:g} s") from None


class OutsideCalls:
    """Guards the methods of a public service."""

    def __init__(self, max_calls: int) -> None:
        """``max_calls``: that the server may have open."""
        # Watch needs no key and never ends by itself. A quarter of the calls keeps any client from filling the server
        # with it.
        self._watches = AdmissionLimit(max(max_calls // _WATCH_SHARE, 1))

    def guard(self, method: str, behaviour: Any) -> Any:
        """Return the handler of a method with its guard, if it needs one."""
        if method == WATCH:
            return self._watching(behaviour)
        return _impatient(behaviour) if method == REFLECTION else behaviour

    def _watching(self, behaviour: Any) -> Any:
        async def watch(request: object, context: object) -> object:
            if (place := self._watches.take(1)) is None:
                message = f"{self._watches.size} calls watch the health already; use Check"
                raise errors.ResourceExhausted(message, retry_after=MESSAGE_SECONDS)
            with place:
                return await behaviour(request, context)

        return watch


class _Impatient:
    """Ends a stream of requests that do not follow each other."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> "_Impatient":
        return self

    async def __anext__(self) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                return await anext(self._requests)
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no request arrived within {MESSAGE_SECONDS:g} s") from None


def _impatient(behaviour: Any) -> Any:
    async def call(requests: AsyncIterator[Any], context: object) -> object:
        return await behaviour(_Impatient(requests), context)

    return call
