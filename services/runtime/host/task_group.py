"""A TaskGroup whose first failure is raised as it is, so that callers tell errors apart by type."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """As ``asyncio.TaskGroup``, without the ``ExceptionGroup``."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
