from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tests.services.engine.peer import Peer, make_add, make_settings, running_engine
from tokenloom.services.runtime.channels import open_channel
from tokenloom.services.runtime.host import Host
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_KEEP,
    GetEngineInfoRequest,
    PauseRequest,
    ResetPrefixCacheRequest,
    ResumeRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub


@pytest.fixture
async def host(socket_dir: Path) -> AsyncIterator[Host]:
    async with running_engine(make_settings(socket_dir, max_model_len=500)) as host:
        yield host


@pytest.fixture
async def admin(host: Host) -> AsyncIterator[EngineAdminStub]:
    async with open_channel(host.address) as channel:
        yield EngineAdminStub(channel)


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


async def test_what_comes_later_says_so(admin: EngineAdminStub) -> None:
    for call in (
        admin.Pause(PauseRequest(mode=PAUSE_MODE_KEEP)),
        admin.Resume(ResumeRequest()),
        admin.ResetPrefixCache(ResetPrefixCacheRequest(preempt_running=True)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
