"""Opens channels to servers that run already."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from tokenloom.services.runtime.peers.channels import open_channel


@asynccontextmanager
async def ready_channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel and wait until it is connected.

    An attempt to connect lasts a tenth of a second at most, which a loaded machine can exceed. The first call would
    then fail with UNAVAILABLE.
    """
    async with open_channel(address) as channel:
        await channel.channel_ready()
        yield channel
