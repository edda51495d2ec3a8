import grpc
import pytest

from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import engine_pb2
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_UNSPECIFIED,
    PAUSE_MODE_WAIT,
    WAKE_TAG_KV_CACHE,
    WAKE_TAG_WEIGHTS,
    IsSleepingRequest,
    PauseMode,
    SleepRequest,
    WakeUpRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub


async def is_sleeping(admin: EngineAdminStub) -> bool:
    return (await admin.IsSleeping(IsSleepingRequest())).sleeping


@pytest.mark.parametrize("mode", [PAUSE_MODE_WAIT, PAUSE_MODE_KEEP])
@pytest.mark.parametrize("level", [0, 1, 2])
async def test_requests_outlast_sleep_and_those_that_come_meanwhile_wait(
    admin: EngineAdminStub, host: Host, level: int, mode: PauseMode
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 30))
        await peer.read_tokens()
        freed = await admin.Sleep(SleepRequest(level=level, mode=mode))
        assert bool(freed.kv_cache_bytes) == (level > 0)
        assert await is_sleeping(admin)
        await peer.send(make_add(2, [2], 5))
        info = await admin.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert info.pause_mode == mode, "the coordinator is told the same"
        if level:
            await admin.WakeUp(WakeUpRequest(tags=[WAKE_TAG_WEIGHTS]))
            assert await is_sleeping(admin)
        await admin.WakeUp(WakeUpRequest(tags=[WAKE_TAG_WEIGHTS, WAKE_TAG_KV_CACHE]))
        assert not await is_sleeping(admin)
        received = await peer.read_until_finished([1, 2])
        assert received.token_ids[2] == expected_tokens([2], 5, VOCAB_SIZE)
        assert received.finished[1].num_output_tokens == 30
    info = await admin.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
    assert info.pause_mode == PAUSE_MODE_UNSPECIFIED


async def test_awake_waking_does_nothing_and_ends_no_pause(admin: EngineAdminStub) -> None:
    await admin.WakeUp(WakeUpRequest())
    await admin.Pause(engine_pb2.PauseRequest(mode=PAUSE_MODE_KEEP))
    await admin.WakeUp(WakeUpRequest())
    info = await admin.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
    assert info.pause_mode == PAUSE_MODE_KEEP


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (SleepRequest(level=3, mode=PAUSE_MODE_ABORT), "INVALID_ARGUMENT", "level must be 0, 1 or 2"),
        (SleepRequest(level=1), "INVALID_ARGUMENT", "mode must be"),
        (SleepRequest(level=2, mode=PAUSE_MODE_ABORT), "FAILED_PRECONDITION", "sleeps at level 1"),
        (SleepRequest(level=1, mode=PAUSE_MODE_KEEP), "FAILED_PRECONDITION", "paused in mode abort"),
        (engine_pb2.ResumeRequest(), "FAILED_PRECONDITION", "call wake_up first"),
        (WakeUpRequest(tags=[9]), "INVALID_ARGUMENT", "WEIGHTS, KV_CACHE or SCHEDULING"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    admin: EngineAdminStub, request_: SleepRequest | WakeUpRequest | engine_pb2.ResumeRequest, code: str, words: str
) -> None:
    await admin.Sleep(SleepRequest(level=1, mode=PAUSE_MODE_ABORT))
    calls = {SleepRequest: admin.Sleep, WakeUpRequest: admin.WakeUp, engine_pb2.ResumeRequest: admin.Resume}
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
        await calls[type(request_)](request_)
    assert refusal.value.code().name == code
    assert await is_sleeping(admin)


async def test_without_a_directory_there_are_no_profiles(admin: EngineAdminStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await admin.StartProfile(engine_pb2.StartProfileRequest())
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
