import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.ready_channel import ready_channel
from tests.services.engine.fake_encoder import FakeEncoder, expected_of, make_item, make_media_add, running_encoder
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_service, make_settings, running_engine
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request.prefix_schedule import block_hashes, specimen_hash
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_WAIT,
    GetEngineInfoRequest,
    PauseMode,
    PauseRequest,
    ResetEncoderCacheRequest,
    ResetPrefixCacheRequest,
    ResumeRequest,
    WatchKVEventsRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH


async def test_info_tells_the_engine_as_it_came_up(admin: EngineAdminStub, host: Host) -> None:
    info = await admin.GetEngineInfo(GetEngineInfoRequest())
    assert (info.num_kv_blocks, info.max_model_len, info.fingerprint.model) == (600, 500, "tokenloom-demo")
    assert info.fingerprint.tokenizer
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 400))
        await peer.read_tokens()
        assert (await admin.GetEngineInfo(GetEngineInfoRequest())).running == 1


async def test_the_prefix_cache_is_forgotten_when_nothing_runs(admin: EngineAdminStub, host: Host) -> None:
    async with Peer(host.address) as peer:
        for slot, cached in ((1, False), (2, True)):
            await peer.send(make_add(slot, [8] * 20))
            received = await peer.read_until_finished([slot])
            assert bool(received.finished[slot].cached_tokens) is cached
        await admin.ResetPrefixCache(ResetPrefixCacheRequest())
        await peer.send(make_add(3, [8] * 20))
        assert (await peer.read_until_finished([3])).finished[3].cached_tokens == 0
        await peer.send(make_add(4, [1], 400))
        await peer.read_tokens()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await admin.ResetPrefixCache(ResetPrefixCacheRequest())
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_prefix_cache_is_forgotten_while_requests_run_if_they_may_be_preempted(
    admin: EngineAdminStub, host: Host
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [8] * 20, 100))
        await peer.read_tokens()
        await admin.ResetPrefixCache(ResetPrefixCacheRequest(preempt_running=True))
        received = await peer.read_until_finished([1])
        assert received.token_ids[1] == expected_tokens([8] * 20, 100, VOCAB_SIZE)


async def test_rows_that_wait_are_forgotten_and_asked_for_again(
    admin: EngineAdminStub, host: Host, socket_dir: Path
) -> None:
    encoder = FakeEncoder()
    async with running_encoder(socket_dir, encoder) as address, Peer(host.address) as peer:
        encoder.gate.clear()
        await peer.send(add := make_media_add(1, make_item(4, 10, address)))
        await encoder.called.wait()
        await admin.ResetEncoderCache(ResetEncoderCacheRequest())
        encoder.gate.set()
        assert (await peer.read_until_finished([1])).token_ids[1] == expected_of(add, VOCAB_SIZE)
    assert encoder.calls == {b"image": 2}


@pytest.mark.parametrize("mode", [PAUSE_MODE_WAIT, PAUSE_MODE_KEEP])
async def test_requests_outlast_a_pause(admin: EngineAdminStub, host: Host, mode: PauseMode) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 30))
        await peer.read_tokens()
        await admin.Pause(PauseRequest(mode=mode))
        assert (await admin.GetEngineInfo(GetEngineInfoRequest())).pause_mode == mode
        await peer.send(make_add(2, [2], 3))
        while not (beat := await peer.read()).paused:
            pass
        assert not beat.slot
        assert (1 in peer.received.finished) is (mode == PAUSE_MODE_WAIT)
        assert 2 not in peer.received.token_ids
        await admin.Resume(ResumeRequest())
        received = await peer.read_until_finished([1, 2])
        assert received.token_ids == {
            1: expected_tokens([1], 30, VOCAB_SIZE),
            2: expected_tokens([2], 3, VOCAB_SIZE),
        }


async def test_a_pause_may_end_what_is_there(admin: EngineAdminStub, host: Host) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 400))
        await peer.read_tokens()
        await admin.Pause(PauseRequest(mode=PAUSE_MODE_ABORT))
        await peer.send(make_add(2, [2], 3))
        assert (await peer.read_until_finished([1])).finished[1].reason == FINISH_REASON_ABORT
        await admin.Resume(ResumeRequest())
        assert (await peer.read_until_finished([2])).finished[2].reason == FINISH_REASON_LENGTH


async def test_a_pause_that_cannot_be_says_why(admin: EngineAdminStub, host: Host) -> None:
    await admin.Resume(ResumeRequest())  # not paused: nothing happens
    await admin.Pause(PauseRequest(mode=PAUSE_MODE_WAIT))
    await admin.Pause(PauseRequest(mode=PAUSE_MODE_WAIT))
    for mode, code in ((0, "INVALID_ARGUMENT"), (PAUSE_MODE_KEEP, "FAILED_PRECONDITION")):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await admin.Pause(PauseRequest(mode=mode))
        assert refusal.value.code().name == code
    await admin.Resume(ResumeRequest())


async def test_who_waits_for_a_pause_is_told_when_it_is_ended(admin: EngineAdminStub, host: Host) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 400))
        await peer.read_tokens()
        pausing = asyncio.ensure_future(admin.Pause(PauseRequest(mode=PAUSE_MODE_WAIT)))
        while not (await admin.GetEngineInfo(GetEngineInfoRequest())).pause_mode:
            pass
        await admin.Resume(ResumeRequest())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await pausing
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_who_is_frozen_is_told_when_the_engine_leaves(socket_dir: Path) -> None:
    settings = make_settings(socket_dir)
    service = make_service(settings)
    async with running(service, settings) as host, ready_channel(host.address) as channel, Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 400))
        await peer.read_tokens()
        await EngineAdminStub(channel).Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(service.drain())
            assert (await peer.read_until_finished([1])).finished[1].error.reason == "TRY_ELSEWHERE"


async def test_who_watches_sees_the_prefix_cache_grow_and_vanish(socket_dir: Path) -> None:
    async with (
        running_engine(make_settings(socket_dir, kv_events=True)) as host,
        ready_channel(host.address) as channel,
        Peer(host.address) as peer,
    ):
        admin = EngineAdminStub(channel)
        await peer.send(make_add(1, [1] * 9, 1))
        await peer.read_until_finished([1])
        watch = admin.WatchKVEvents(WatchKVEventsRequest(from_sequence=1))
        stored = await watch.read()
        assert list(stored.events[0].block_stored.token_ids) == [1] * 8
        assert stored.events[0].block_stored.medium == "GPU", "the tier's name in vLLM, on a CPU too"
        await admin.ResetPrefixCache(ResetPrefixCacheRequest())
        cleared = await watch.read()
        assert (cleared.sequence, cleared.engine_epoch) == (2, host.epoch)
        assert [event.WhichOneof("event") for event in cleared.events] == ["all_blocks_cleared"]
        watch.cancel()


async def test_a_coordinator_that_watches_gets_the_hashes_by_which_prompts_are_placed(socket_dir: Path) -> None:
    async with (
        running_engine(make_settings(socket_dir, kv_events=True)) as host,
        ready_channel(host.address) as channel,
        Peer(host.address) as peer,
    ):
        await peer.send(make_add(1, [1] * 9, 1))
        await peer.read_until_finished([1])
        request = WatchKVEventsRequest(from_sequence=1, prefix_interval=Duration(nanos=1_000_000))
        watch = EngineAdminStub(channel).WatchKVEvents(request)
        first, stored = await watch.read(), await watch.read()
        assert first.prefix_changes.specimen_hash == specimen_hash(4)
        named = [int.from_bytes(each[:8], "little") for each in block_hashes([1] * 8, 4)]
        assert [list(chain.blocks) for chain in stored.prefix_changes.stored] == [named]
        watch.cancel()
        for seconds in (-1, 2**63 - 1, -(2**63)):
            wrong = WatchKVEventsRequest(prefix_interval=Duration(seconds=seconds))
            assert await EngineAdminStub(channel).WatchKVEvents(wrong).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engine_that_tells_no_events_says_so(admin: EngineAdminStub) -> None:
    assert await admin.WatchKVEvents(WatchKVEventsRequest()).code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_request_events_are_logged_when_asked_for(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_engine(make_settings(socket_dir, log_request_events=True)) as host, Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 2))
        await peer.read_until_finished([1])
    lines = [record.message for record in caplog.records if record.name.endswith("records.attempt")]
    assert [line.split(" after ")[0] for line in lines] == ["queued", "scheduled"]
