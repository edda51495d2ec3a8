"""Asks the core at intervals whether its workers can compute, and publishes the answer."""

import asyncio
import logging
from typing import NoReturn

from tokenloom.request.errors import TokenloomError
from tokenloom.services.runtime.host.health import Health

from .core.core_link import CoreLink
from .load import LoadTracker

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
"""How long the core may take to answer; it answers between steps, and a step of a large model takes seconds."""


class HealthCheck:
    """Sets the engine's health: gRPC health becomes NOT_SERVING and the coordinator places no requests while a check
    fails. Requests that the engine has accepted continue."""

    def __init__(self, core: CoreLink, load: LoadTracker, health: Health) -> None:
        self._core = core
        self._load = load
        self._health = health

    async def run(self) -> NoReturn:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Ask the core once, and publish the answer if it has changed."""
        error = await self._ask()
        if bool(error) != self._load.is_failing:
            if error:
                log.error("the engine is not healthy and gets no requests: %s", error)
            else:
                log.info("the engine is healthy again")
            self._load.set_failing(bool(error))
            await self._health.set_healthy(not error)

    async def _ask(self) -> str:
        """Return what is wrong; empty: nothing."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._core.call("check_health")
        except TimeoutError:
            return f"the core did not answer within {PATIENCE_SECONDS:g} s"
        except TokenloomError as error:
            return error.message
        return ""
