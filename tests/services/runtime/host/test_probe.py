"""The exit status of a container's health check."""

import asyncio
from pathlib import Path

import pytest

from tests.services.runtime.peers.test_tls import Nothing
from tokenloom.services.runtime.host.probe import main
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings


async def test_the_status_follows_the_part(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServiceSettings.of(listen=f"unix:{socket_dir}/s", health_listen="127.0.0.1:0", metrics_listen="")
    async with running(Nothing(), settings) as host:
        assert await asyncio.to_thread(main, [host.health_address]) == 0
        monkeypatch.setenv("TOKENLOOM_HEALTH_LISTEN", host.health_address)
        assert await asyncio.to_thread(main, []) == 0
        await host.health.set_serving(False)
        assert await asyncio.to_thread(main, []) == 1
    assert await asyncio.to_thread(main, []) == 1


def test_a_wrong_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TOKENLOOM_HEALTH_LISTEN", raising=False)
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
