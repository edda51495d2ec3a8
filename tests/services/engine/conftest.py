"""An engine over the hash worker, and its administrator."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ready_channel import ready_channel
from tests.services.engine.peer import make_settings, running_engine
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub


@pytest.fixture
async def host(socket_dir: Path) -> AsyncIterator[Host]:
    async with running_engine(make_settings(socket_dir, max_model_len=500)) as host:
        yield host


@pytest.fixture
async def admin(host: Host) -> AsyncIterator[EngineAdminStub]:
    async with ready_channel(host.address) as channel:
        yield EngineAdminStub(channel)
