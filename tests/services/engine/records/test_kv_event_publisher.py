"""Tests what routers of others receive of a prefix cache, as vLLM's subscribers read it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
import zmq.auth

from tokenloom.engine_core.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StateStored
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.packed_ids import pack
from tokenloom.services.engine.records.engine_settings import EngineSettings, KVEventsConfig
from tokenloom.services.engine.records.kv_event_publisher import KVEventPublisher, of_rank
from tokenloom.services.runtime.telemetry import kv_events
from tokenloom.services.runtime.telemetry.kv_events import EventBatch, KVEventReader, KVEventSource

SOON = 30.0
FIRST, SECOND = bytes(range(32)), bytes(range(100, 132))
STORED = BlockStored([FIRST, SECOND], None, bytearray(pack([1, 2, 3, 4])), 2, "GPU")
Numbered = tuple[int, EventBatch]


@pytest.fixture(autouse=True)
def asks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose subscription took effect late asks at once for what it missed."""
    monkeypatch.setattr(kv_events, "IDLE_SECONDS", 0.05)


def config(folder: Path, **options: Any) -> KVEventsConfig:
    defaults = {"endpoint": f"ipc://{folder}/live", "replay_endpoint": f"ipc://{folder}/replay"}
    return KVEventsConfig(enable_kv_cache_events=True, **(defaults | options))


@contextmanager
def publishing(config: KVEventsConfig, rank: int = 0) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(config, rank, lambda: 12.5)
    task = asyncio.ensure_future(publisher.run()) if config.replay_endpoint else None
    try:
        yield publisher
    finally:
        if task is not None:
            task.cancel()
        publisher.close()


def source(config: KVEventsConfig, **options: Any) -> KVEventSource:
    return KVEventSource(config.endpoint, config.replay_endpoint, **options)


async def until_subscribed(
    publisher: KVEventPublisher, reader: KVEventReader, stream: AsyncIterator[Numbered]
) -> Numbered:
    """Publish until the reader has received something, and return that. Publishers do not know their subscribers."""
    coming = asyncio.ensure_future(anext(stream))
    async with asyncio.timeout(SOON):
        while not coming.done():
            publisher.publish([AllBlocksCleared()])
            await asyncio.wait([coming], timeout=0.02)
    return await coming


async def take(stream: AsyncIterator[Numbered], end: int) -> list[Numbered]:
    """Return the batches up to number ``end``."""
    found: list[Numbered] = []
    async with asyncio.timeout(SOON):
        while not found or found[-1][0] < end:
            found.append(await anext(stream))
    return found


async def test_a_message_is_what_vllms_subscribers_read(tmp_path: Path) -> None:
    setup = config(tmp_path, topic="kv@engine-0", token_ids=True)
    with publishing(setup, rank=3) as publisher, zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live:
        live.subscribe("kv@")
        live.connect(publisher.endpoint)
        frames: list[bytes] = []
        async with asyncio.timeout(SOON):
            while not frames:
                publisher.publish([STORED, BlockRemoved([FIRST], "GPU"), AllBlocksCleared(), StateStored(FIRST)])
                if await live.poll(20):
                    frames = await live.recv_multipart()
    topic, number, payload = frames
    assert topic == b"kv@engine-0"
    assert int.from_bytes(number, "big") < publisher.num_published
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (12.5, 3)
    hashes = [int.from_bytes(each, "big") & (1 << 64) - 1 for each in (FIRST, SECOND)]  # as vLLM converts them
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": hashes[:1], "medium": "GPU"},
        {"type": "AllBlocksCleared"},
    ]


async def test_token_ids_are_published_only_when_asked(tmp_path: Path) -> None:
    for shows in (False, True):
        with publishing(config(tmp_path, token_ids=shows)) as publisher:
            reader = KVEventReader(source(config(tmp_path)))
            async with aclosing(reader.read()) as stream:
                await until_subscribed(publisher, reader, stream)
                publisher.publish([STORED])
                *_, (_, batch) = await take(stream, publisher.num_published - 1)
            (event,) = msgspec.to_builtins(batch.events)
            assert event["token_ids"] == ([1, 2, 3, 4] if shows else [])


async def test_states_alone_make_no_message(tmp_path: Path) -> None:
    with publishing(config(tmp_path)) as publisher:
        publisher.publish([StateStored(FIRST)])
        assert publisher.num_published == 0


async def test_a_reader_that_comes_late_gets_what_was_kept(tmp_path: Path) -> None:
    with publishing(config(tmp_path, buffer_steps=100)) as publisher:
        for at in range(20):
            publisher.publish([BlockRemoved([bytes([at]) * 32], "GPU")])
        reader = KVEventReader(source(config(tmp_path)))
        async with aclosing(reader.read()) as stream:
            first = await until_subscribed(publisher, reader, stream)
            found = [first, *await take(stream, 20)]
    assert [number for number, _ in found] == list(range(len(found)))
    assert reader.num_replayed >= 20
    assert reader.num_lost == 0


async def test_what_follows_a_gap_is_given_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay brings messages too that the subscription is about to bring."""
    with publishing(config(tmp_path)) as publisher:
        reader = KVEventReader(source(config(tmp_path)))
        async with aclosing(reader.read()) as stream:
            await until_subscribed(publisher, reader, stream)
            while reader.num_batches <= reader.num_replayed:  # until one came by the subscription
                publisher.publish([STORED])
                await take(stream, publisher.num_published - 1)
            monkeypatch.setattr(kv_events, "IDLE_SECONDS", SOON)
            begin, live = publisher.num_published, publisher._pub
            publisher._pub = SimpleNamespace(send_multipart=lambda *_: None)
            publisher.publish([STORED])
            publisher._pub = live
            for _ in range(4):
                publisher.publish([STORED])
            async with asyncio.timeout(SOON / 3):
                found = await take(stream, begin + 4)
                publisher.publish([STORED])
                found += await take(stream, begin + 5)
    assert [number for number, _ in found] == [*range(begin, begin + 6)]
    assert (reader.num_lost, reader.num_restarts) == (0, 0)


async def test_a_long_replay_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """To send to a peer that has room does not wait."""
    with publishing(config(tmp_path)) as publisher:
        for _ in range(2000):
            publisher.publish([STORED])
        assert publisher._replay is not None
        replay, num_turns = asyncio.ensure_future(publisher._send_kept(publisher._replay, b"peer", bytes(8))), 0
        while not replay.done():
            await asyncio.sleep(0)
            num_turns += 1
        await replay
    assert num_turns >= 20


async def test_what_is_no_longer_kept_is_said_to_be_lost(tmp_path: Path) -> None:
    with publishing(config(tmp_path, buffer_steps=5)) as publisher:
        for at in range(20):
            publisher.publish([BlockRemoved([bytes([at]) * 32], "GPU")])
        reader = KVEventReader(source(config(tmp_path)))
        async with aclosing(reader.read()) as stream:
            _, batch = await until_subscribed(publisher, reader, stream)
    assert msgspec.to_builtins(batch.events) == [{"type": "AllBlocksCleared"}]
    assert reader.num_lost >= 15


async def test_a_publisher_that_begins_anew_clears_what_is_known(tmp_path: Path) -> None:
    setup = config(tmp_path)
    reader = KVEventReader(source(setup))
    async with aclosing(reader.read()) as stream:
        with publishing(setup) as publisher:
            for _ in range(50):
                publisher.publish([STORED])
            await until_subscribed(publisher, reader, stream)
            await take(stream, publisher.num_published - 1)
        before = reader.num_batches
        with publishing(setup) as publisher:
            _, batch = await until_subscribed(publisher, reader, stream)
    assert reader.num_restarts == 1
    assert (batch.ts, msgspec.to_builtins(batch.events)) == (0.0, [{"type": "AllBlocksCleared"}])
    assert before >= 50


async def test_only_subscribers_with_a_known_key_are_admitted(tmp_path: Path) -> None:
    clients, own = tmp_path / "clients", tmp_path / "own"
    for folder in (clients, own):
        folder.mkdir()
    _, engine = zmq.auth.create_certificates(own, "engine")
    _, known = zmq.auth.create_certificates(clients, "known")
    _, stranger = zmq.auth.create_certificates(own, "stranger")
    setup = config(tmp_path, curve_key_file=engine, curve_clients=str(clients))
    server = own / "engine.key"
    with publishing(setup) as publisher:
        refused = KVEventReader(source(setup, key_file=Path(stranger), server_key_file=server))
        plain = KVEventReader(source(setup))
        admitted = KVEventReader(source(setup, key_file=Path(known), server_key_file=server))
        async with aclosing(refused.read()) as one, aclosing(plain.read()) as two, aclosing(admitted.read()) as three:
            others = [asyncio.ensure_future(anext(each)) for each in (one, two)]
            await until_subscribed(publisher, admitted, three)
            publisher.publish([STORED])
            await take(three, publisher.num_published - 1)
            assert not any(each.done() for each in others)
            for each in others:
                each.cancel()
            await asyncio.wait(others)
    assert (refused.num_batches, plain.num_batches) == (0, 0)
    assert admitted.num_batches >= 2


async def test_a_malformed_request_for_a_replay_ends_nothing(tmp_path: Path) -> None:
    setup = config(tmp_path)
    with publishing(setup) as publisher, zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"", b"1"], [b"", b"x" * 1000], [b"", bytes(8), b""]):
            await socket.send_multipart(frames)
        publisher.publish([STORED])
        await socket.send_multipart([b"", bytes(8)])
        async with asyncio.timeout(SOON):
            answer, end = await socket.recv_multipart(), await socket.recv_multipart()
    assert answer[2] == bytes(8)
    assert int.from_bytes(end[2], "big", signed=True) == -1


async def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    setup = config(tmp_path, endpoint="tcp://127.0.0.1:0", replay_endpoint=None)
    with publishing(setup) as publisher:
        taken = config(tmp_path, endpoint=publisher.endpoint, replay_endpoint=None)
        with pytest.raises(InvalidArgument, match=r"endpoint: tcp://127.0.0.1:\d+ cannot be bound"):
            KVEventPublisher(taken, 0, lambda: 0.0)


async def test_a_path_is_taken_over_only_from_an_engine_that_is_gone(tmp_path: Path) -> None:
    setup = config(tmp_path, replay_endpoint=None)
    with (
        publishing(setup),
        pytest.raises(InvalidArgument, match=r"endpoint: ipc://.*/live cannot be bound: another process"),
    ):
        KVEventPublisher(setup, 0, lambda: 0.0)
    assert (tmp_path / "live").exists()  # as after a crash
    with publishing(setup) as publisher:
        assert publisher.endpoint == setup.endpoint


def test_each_rank_has_an_address_of_its_own() -> None:
    assert of_rank("tcp://127.0.0.1:5557", 2) == "tcp://127.0.0.1:5559"
    assert of_rank("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert of_rank("ipc:///run/kv", 0) == "ipc:///run/kv"
    assert of_rank("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"endpoint": "tcp://*:5557"}, "other machines could read"),
        ({"endpoint": "tcp://0.0.0.0:5557"}, "other machines could read"),
        ({"replay_endpoint": "tcp://10.0.0.1:1"}, "replay_endpoint"),
        ({"endpoint": "tcp://127.0.0.1"}, "must be tcp"),
        ({"endpoint": "udp://127.0.0.1:1"}, "must be tcp"),
        ({"endpoint": "ipc://relative"}, "must be tcp"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "must be tcp"),
        ({"curve_key_file": "/a"}, "set together"),
    ],
)
def test_settings_that_would_show_the_cache_to_others_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KVEventsConfig(enable_kv_cache_events=True, **options)


def test_the_events_are_off_unless_they_are_enabled() -> None:
    assert not EngineSettings().engine.cache.kv_events
    for text, is_on in (
        ("{}", False),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', False),
        ('{"enable_kv_cache_events": true}', True),
    ):
        assert EngineSettings.of(kv_events_config=text).engine.cache.kv_events == is_on
    with pytest.raises(ValueError, match="--enable-prefix-caching"):
        EngineSettings.of(kv_events_config='{"enable_kv_cache_events": true}', enable_prefix_caching=False)
