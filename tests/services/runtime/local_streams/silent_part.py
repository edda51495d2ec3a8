"""A process that serves an echo over local streams until it is killed: ``path tick_seconds``. After the message
``busy SECONDS`` its event loop is busy for so long."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.services.runtime.local_streams.conftest import serving
from tokenloom.services.runtime.local_streams import socket_end


async def echo(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        if request.startswith(b"busy "):
            end = time.monotonic() + float(request.removeprefix(b"busy "))
            while time.monotonic() < end:
                pass
        await context.write(request)


async def main(path: str, tick_seconds: str) -> None:
    socket_end.TICK_SECONDS = float(tick_seconds)
    async with serving(echo, Path(path)):
        print("serving", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
