"""A process that serves an echo over local streams until it is killed: ``path tick_seconds``."""

import asyncio
import sys
from pathlib import Path

from tests.services.runtime.local_streams.conftest import echo, serving
from tokenloom.services.runtime.local_streams import connection


async def main(path: str, tick_seconds: str) -> None:
    connection.TICK_SECONDS = float(tick_seconds)
    async with serving(echo, Path(path)):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
