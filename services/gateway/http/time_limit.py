"""Limits the time of a call that answers without a generation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tokenloom.request import errors


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """Run the ``async with`` block for at most so long. Raises :class:`errors.DeadlineExceeded` otherwise."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the request took longer than {seconds:g} s") from None
