"""Distinguishes a gateway that is lost from one whose answer takes long."""

import asyncio

from .http_request import ConnectionLost, ConnectionRefused, send

EVERY_SECONDS = 1.0
"""How long to wait between two probes."""
TIMEOUT_SECONDS = 1.5
"""A gateway that does not answer its health check for so long is lost."""


async def until_lost(address: str, seconds: float) -> None:
    """Ask a gateway for its health until it does not answer within ``seconds``. Any answer will do, also that of a
    degraded mesh."""
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        try:
            async with asyncio.timeout(seconds), send("GET", address, "/health"):
                pass
        except (TimeoutError, ConnectionRefused, ConnectionLost):
            return
