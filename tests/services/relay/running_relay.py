"""Runs a relay as its process does."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.relay.service import RelayService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running


@asynccontextmanager
async def running_relay(**values: Any) -> AsyncIterator[Host]:
    """Its host. ``values``: of its settings."""
    settings = RelaySettings.of(**{"metrics_listen": "", "drain_timeout": 0.0, **values})
    async with running(RelayService(settings), settings) as host:
        yield host


def count(host: Host, name: str) -> float:
    """Return the value of one of its metrics."""
    return host.metrics.get_sample_value(f"tokenloom_relay_{name}") or 0.0
