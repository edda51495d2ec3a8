"""Tests, over unix sockets, that the coordinator follows the caches of engines that publish their events."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.services.coordinator.policies import DEFAULT_POLICY
from tokenloom.engine_core.data.kv_events import AllBlocksCleared, BlockRemoved, KVEventLog
from tokenloom.request.prefix_schedule import specimen_hash
from tokenloom.services.coordinator import cache_followers
from tokenloom.services.coordinator.cache_followers import CacheFollowers, EngineCache
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.engine.records.kv_event_feed import KVEventFeed
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.tasks import Failure, Tasks
from tokenloom.v1 import engine_pb2_grpc
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import WatchKVEventsRequest
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

FINGERPRINT = Fingerprint(model="m", block_size=16)
HASHES = [bytes([1, index]) + bytes(30) for index in range(4)]
NAMED = [int.from_bytes(each[:8], "little") for each in HASHES]


class FakeEngine(engine_pb2_grpc.EngineAdminServicer):
    """Publishes what a test lets its cache do."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.feed = KVEventFeed(7, capacity=3)
        self.specimen = specimen_hash(16)
        self.calls: list[WatchKVEventsRequest] = []

    async def WatchKVEvents(self, request: WatchKVEventsRequest, context: Any) -> None:  # type: ignore[override]
        self.calls.append(request)
        sequence = request.from_sequence if request.HasField("from_sequence") else None
        try:
            async for response in self.feed.follow_prefixes(sequence, 0.0, self.specimen):
                await context.write(response)
        except Exception as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    def store(self, first: int, end: int) -> None:
        log = KVEventLog(16)
        for index in range(first, end):
            log.stored(HASHES, index, [0] * 16)
        self.feed.publish(log.take())

    def evict(self, *indices: int) -> None:
        self.feed.publish([BlockRemoved([HASHES[index] for index in indices], "GPU")])


class Mesh:
    """Engines that joined a registry, which follows them."""

    def __init__(self, folder: Path, spawn: Callable[..., "asyncio.Task[Any]"]) -> None:
        self.folder = folder
        self.registry = Registry(1, asyncio.get_running_loop().time, policy=DEFAULT_POLICY, settle_seconds=0)
        self.caches = CacheFollowers(self.registry.prefixes, self.registry.states, Channels(), spawn)

    @asynccontextmanager
    async def engine(self, name: str = "a") -> AsyncIterator[FakeEngine]:
        engine, server = FakeEngine(name, f"unix:{self.folder}/{name}"), grpc.aio.server()
        engine_pb2_grpc.add_EngineAdminServicer_to_server(engine, server)
        server.add_insecure_port(engine.address)
        await server.start()
        yield engine
        await server.stop(None)

    def join(self, engine: FakeEngine, *, publishes: bool = True, epoch: int = 7) -> EngineRecord:
        identity = EngineIdentity(
            engine_id=engine.name, epoch=epoch, address=engine.address, fingerprint=FINGERPRINT, num_kv_blocks=100,
            publishes_kv_events=publishes,
        )  # fmt: skip
        report = EngineReport(
            role=EngineRole.ENGINE_ROLE_BOTH, state=EngineState.ENGINE_STATE_SERVING, free_kv_blocks=100
        )
        record = self.registry.join(identity, report)
        self.caches.join(record)
        return record

    def pick(self, blocks: Sequence[int] = NAMED) -> str:
        request = PickRequest(
            fingerprint=FINGERPRINT, role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=65, block_hash_prefixes=blocks
        )
        return self.registry.pick(request).engine.engine_id

    def known(self, row: int = 0, blocks: Sequence[int] = NAMED) -> int:
        counts = self.registry.prefixes.num_blocks(self.registry.prefixes.find(blocks), 16)
        return 0 if counts is None else int(counts[row])


@pytest.fixture
async def mesh(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.setattr(cache_followers, "RETRY_SECONDS", 0.01)
    failure = Failure()
    tasks = Tasks(failure.set)
    yield Mesh(socket_dir, tasks.spawn)
    await tasks.close()
    failure.raise_unseen()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_evicted_blocks_attract_no_more(mesh: Mesh) -> None:
    async with mesh.engine() as engine:
        mesh.join(engine)
        mesh.pick()
        mesh.caches.follow(0.001)
        await until(lambda: len(engine.calls) == 1 and mesh.caches.num_followed == 1)
        engine.store(0, 4)
        engine.evict(3, 2)
        await until(lambda: mesh.known() == 2)
        engine.store(2, 3)
        await until(lambda: mesh.known() == 3)
        engine.feed.publish([AllBlocksCleared()])
        await until(lambda: mesh.known() == 0)
        assert engine.calls[0].prefix_interval.ToMilliseconds() == 5


async def test_no_engine_is_called_before_prompts_are_placed_by_prefixes(mesh: Mesh) -> None:
    async with mesh.engine("a") as publishing, mesh.engine("b") as silent:
        mesh.join(publishing)
        mesh.join(silent, publishes=False)
        assert mesh.caches.num_followed == 0
        mesh.caches.follow(0.001)
        mesh.caches.follow(0.001)
        await until(lambda: len(publishing.calls) == 1)
        assert (mesh.caches.num_followed, silent.calls) == (1, [])


async def test_a_call_that_ended_is_continued_where_it_was(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_followers, "RENEW_SECONDS", 0.05)
    async with mesh.engine() as engine:
        mesh.join(engine)
        mesh.caches.follow(0.001)
        await until(lambda: len(engine.calls) >= 2)
        engine.store(0, 4)
        await until(lambda: mesh.known() == 4)
        await until(lambda: engine.calls[-1].from_sequence == 2)
        assert mesh.known() == 4


async def test_what_was_missed_is_dropped_and_learnt_anew(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh.engine() as engine:
        mesh.join(engine)
        mesh.caches.follow(0.001)
        await until(lambda: len(engine.calls) == 1)
        engine.store(0, 4)
        await until(lambda: mesh.known() == 4)
    async with mesh.engine() as engine:  # the link was away for longer than the engine keeps batches
        for _ in range(6):
            engine.evict(0)
        await until(lambda: len(engine.calls) >= 2 and mesh.known() == 0)
        engine.store(0, 2)
        await until(lambda: mesh.known() == 2)


async def test_an_engine_that_leaves_is_followed_no_more_and_a_new_incarnation_is(mesh: Mesh) -> None:
    async with mesh.engine() as engine:
        record = mesh.join(engine)
        mesh.caches.follow(0.001)
        await until(lambda: len(engine.calls) == 1)
        mesh.join(engine)  # the same incarnation on a new stream
        assert mesh.caches.num_followed == 1
        mesh.registry.leave(record)
        mesh.caches.leave("a")
        await until(lambda: mesh.caches.num_followed == 0)
        engine.feed = KVEventFeed(8)
        mesh.join(engine, epoch=8)
        await until(lambda: len(engine.calls) == 2)
        engine.store(0, 4)
        await until(lambda: mesh.known() == 4)


async def test_an_engine_that_hashes_otherwise_is_left_alone(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    async with mesh.engine() as engine:
        engine.specimen = specimen_hash(16, b"another seed")
        mesh.join(engine)
        mesh.pick()
        with caplog.at_level(logging.WARNING):
            mesh.caches.follow(0.001)
            await until(lambda: mesh.caches.num_followed == 0)
        assert "unfollowed_cache of a: " in caplog.text
        assert "(it hashes blocks otherwise" in caplog.text
        assert mesh.known() == 4  # what was picked


def test_a_scrape_counts_while_engines_join() -> None:
    """A scrape runs in a thread of its own: the event loop may add engines between two of those that it counts."""

    class Task:
        def done(self) -> bool:
            followers._tasks[f"new-{len(followers._tasks)}"] = 1, task
            return False

    task: Any = Task()
    nothing: Any = None
    followers = CacheFollowers(nothing, nothing, nothing, nothing)
    followers._tasks = {f"engine-{number}": (1, task) for number in range(1, 4)}
    assert followers.num_followed == 3


async def test_events_that_cannot_be_end_nothing_but_the_following(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("int too big to convert")

    async with mesh.engine() as engine:
        mesh.join(engine)
        mesh.pick()
        monkeypatch.setattr(EngineCache, "take", fail)
        mesh.caches.follow(0.001)
        await until(lambda: len(engine.calls) == 1)
        engine.store(0, 4)
        await until(lambda: "are not followed any more" in caplog.text)
        assert "unfollowed_cache of a: " in caplog.text
        assert mesh.pick() == "a"
