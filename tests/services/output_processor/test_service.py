"""The lifecycle of an output processor."""

import asyncio
from pathlib import Path

import pytest

from tests.services.output_processor.fakes import SOON
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.service import OutputProcessorService
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.registry import registry_view as registry_watch
from tokenloom.services.runtime.registry.registry_view import RegistryView


async def test_a_stop_is_clean_while_the_coordinator_is_away(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Event()

    def view_of_call() -> RegistryView:
        asked.set()
        return RegistryView()

    monkeypatch.setattr(registry_watch, "RegistryView", view_of_call)
    monkeypatch.setattr(registry_watch, "REWATCH_SECONDS", 0.0)  # it asks again while the service closes
    settings = OutputProcessorSettings.of(
        listen=f"unix:{socket_dir}/o", metrics_listen="", coordinator=f"unix:{socket_dir}/nobody"
    )
    for _ in range(10):  # the end comes at another place of the watch each time
        async with asyncio.timeout(SOON), running(OutputProcessorService(settings), settings) as host:
            for _ in range(3):
                await asked.wait()
                asked.clear()
        assert not host.failure.happened
