"""Which tests run on both event loops."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop

BOTH_LOOPS = ("test_tls_front.py", "test_held_protocol.py", "test_connection_holder.py", "test_held_response.py")
"""Tests of what depends on the loop: services run on uvloop, their tests on asyncio's own."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    return loops | {"uvloop": uvloop.new_event_loop} if item.path.name in BOTH_LOOPS else loops
