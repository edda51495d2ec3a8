"""Reads the requests that a client sends on one stream, with a limit on its silence."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from tokenloom.request.errors import DeadlineExceeded

T = TypeVar("T")


async def next_request(requests: AsyncIterator[T], idle_seconds: float, noun: str) -> T | None:
    """Return the next request of a stream; None at its end. ``noun``: what the method calls a request.

    Raises ``DeadlineExceeded`` after ``idle_seconds`` without one: an open stream is one of the calls that the server
    may have, also while it says nothing.
    """
    try:
        async with asyncio.timeout(idle_seconds):
            return await anext(requests, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no {noun} arrived within {idle_seconds:g} s") from None
