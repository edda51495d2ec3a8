"""Tests that the last snapshot is used while the coordinator is away, and is replaced when it returns."""

import asyncio
from pathlib import Path

import pytest

from tests.services.output_processor.fakes import SOON, FakeCoordinator, serve_coordinator, submit
from tokenloom.request.errors import Unavailable
from tokenloom.services.output_processor.placement.engine_search import EngineSearch
from tokenloom.services.output_processor.placement.placement import EngineLinks, Placer
from tokenloom.services.runtime.host.tasks import Tasks
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

FINGERPRINT = Fingerprint(model="m")


def engine(name: str, directory: Path) -> EngineIdentity:
    address = f"unix:{directory}/{name}"  # nothing listens there
    return EngineIdentity(engine_id=name, epoch=1, address=address, fingerprint=FINGERPRINT)


def without_time() -> EngineSearch:
    return EngineSearch(give_up_at=0.0)


async def test_the_coordinator_may_go_and_return(socket_dir: Path) -> None:
    failures: list[BaseException] = []
    tasks = Tasks(failures.append)
    channels = Channels()
    links = EngineLinks(
        lambda identity: make_hello("output-processor-0", 3), failures.append, channels, hang_seconds=60
    )
    placer = Placer(channels.open(f"unix:{socket_dir}/c", "coordinator"), FINGERPRINT, links)
    tasks.spawn(placer.run(), name="coordinator")
    with pytest.raises(Unavailable, match=r"No engine could take .* No engine is serving"):
        await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())

    fake = FakeCoordinator([engine("a", socket_dir)], [EngineRole.ENGINE_ROLE_BOTH])
    async with serve_coordinator(socket_dir / "c", fake):
        await asyncio.wait_for(fake.watched.wait(), SOON)
        with pytest.raises(Unavailable, match="No engine"):  # nothing listens where the coordinator sends it
            await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())
    with pytest.raises(Unavailable, match="No engine"):  # placed by the last snapshot
        await placer.place(submit(1), EngineRole.ENGINE_ROLE_PREFILL, without_time())

    returned = FakeCoordinator([engine("b", socket_dir)], [EngineRole.ENGINE_ROLE_BOTH])
    async with serve_coordinator(socket_dir / "c", returned):
        await asyncio.wait_for(returned.watched.wait(), SOON)
    await tasks.close()
    await placer.close()
    assert not failures
