"""Asks the core at intervals whether its workers can compute, and publishes the answer."""

import asyncio
import logging
from typing import NoReturn

from tokenloom.process.fall_backs import FallBacks
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

    def __init__(self, core: CoreLink, load: LoadTracker, health: Health, fall_backs: FallBacks) -> None:
        """``fall_backs``: those of the engine; the core's are added."""
        self._core = core
        self._load = load
        self._health = health
        self._fall_backs = fall_backs

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
            # Only new requests stay away: those that run may still end, and ending them would lose work for a passing
            # fault.
            self._load.set_failing(bool(error))
            await self._health.set_healthy(not error)

    def _show(self, fall_backs: object) -> None:
        """Show what the core does without since its start. ``fall_backs``: pairs of kind and detail."""
        for kind, detail in fall_backs if isinstance(fall_backs, list) else ():
            self._fall_backs.begin(kind, detail)

    async def _ask(self) -> str:
        """Return what is wrong; empty: nothing."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._core.call("check_health")
                self._show(await self._core.call("fall_backs"))
        except TimeoutError:
            return f"the core did not answer within {PATIENCE_SECONDS:g} s"
        except TokenloomError as error:
            return error.message
        return ""
