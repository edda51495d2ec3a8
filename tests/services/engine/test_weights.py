import errno
import json
from pathlib import Path

import grpc
import pytest

from tests.ready_channel import ready_channel
from tests.services.engine.control.test_coordinator_link import is_serving, running_coordinator, see
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings, running_engine
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.services.engine import engine_admin as weights
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import engine_pb2
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_PAUSED
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_KEEP,
    PAUSE_MODE_UNSPECIFIED,
    ReloadWeightsRequest,
    SleepRequest,
    WakeUpRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    return tmp_path


async def info_of(admin: EngineAdminStub) -> engine_pb2.GetEngineInfoResponse:
    return await admin.GetEngineInfo(engine_pb2.GetEngineInfoRequest())


async def test_peers_learn_of_new_weights_by_their_fingerprint(
    admin: EngineAdminStub, host: Host, checkpoint: Path
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [8] * 20, 5))
        await peer.read_until_finished([1])
        answer = await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        assert answer.fingerprint.weights == weights_fingerprint(checkpoint)
        with pytest.raises(grpc.aio.AioRpcError, match="weights were replaced"):
            await peer.read_until_finished([2])
    info = await info_of(admin)
    assert info.fingerprint == answer.fingerprint
    assert info.pause_mode == PAUSE_MODE_UNSPECIFIED
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [8] * 20, 5))
        received = await peer.read_until_finished([1])
        assert received.frames[0].hello.fingerprint == answer.fingerprint
        assert received.token_ids[1] == expected_tokens([8] * 20, 5, VOCAB_SIZE)
        assert received.finished[1].cached_tokens == 0


async def test_the_coordinator_places_by_the_new_fingerprint_and_not_on_a_sleeping_engine(
    socket_dir: Path, checkpoint: Path
) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with (
        running_coordinator(socket_dir) as (stub, _),
        running_engine(settings) as host,
        ready_channel(host.address) as channel,
    ):
        admin = EngineAdminStub(channel)
        await see(stub, is_serving)
        await admin.Sleep(SleepRequest(level=2, mode=PAUSE_MODE_KEEP))
        await see(stub, lambda engines: [engine.report.state for engine in engines] == [ENGINE_STATE_PAUSED])
        answer = await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        await admin.WakeUp(WakeUpRequest())
        (engine,) = await see(
            stub, lambda engines: is_serving(engines) and bool(engines[0].identity.fingerprint.weights)
        )
        assert engine.identity.fingerprint == answer.fingerprint


async def test_blocks_are_shared_by_the_weights_that_computed_them(
    socket_dir: Path, tmp_path: Path, checkpoint: Path
) -> None:
    """Through a store, where old and new weights have their own."""
    folder = tmp_path / "kv"
    settings = make_settings(socket_dir, kv_store=folder.as_uri(), kv_store_bytes=1 << 20)
    async with running_engine(settings) as host, ready_channel(host.address) as channel:
        admin = EngineAdminStub(channel)
        cached = []
        for weights in (None, checkpoint, checkpoint):
            if weights is not None:
                await admin.ReloadWeights(ReloadWeightsRequest(path=str(weights)))
            async with Peer(host.address) as peer:
                await peer.send(make_add(1, [8] * 21, 2))
                received = await peer.read_until_finished([1])
                cached.append(received.finished[1].cached_tokens)
                while len(list(folder.glob("*.kv"))) < 5 * min(2, len(cached)):
                    await info_of(admin)
        assert cached == [0, 0, 20], "the third time the same weights are there as before, and the pool is empty"


async def test_live_requests_keep_their_weights_unless_the_engine_is_paused(
    admin: EngineAdminStub, host: Host, checkpoint: Path
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [1], 400))
        await peer.read_tokens()
        with pytest.raises(grpc.aio.AioRpcError, match="pause the engine first"):
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        await admin.Pause(engine_pb2.PauseRequest(mode=PAUSE_MODE_KEEP))
        await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
    assert (await info_of(admin)).pause_mode == PAUSE_MODE_KEEP


@pytest.mark.parametrize(
    ("vocab_size", "path", "code", "words"),
    [
        (VOCAB_SIZE, "relative", "INVALID_ARGUMENT", "absolute path"),
        (VOCAB_SIZE, "/nowhere", "INVALID_ARGUMENT", "checkpoint directory"),
        (5, "", "FAILED_PRECONDITION", "vocab_size is 5 in the checkpoint"),
    ],
)
async def test_what_does_not_fit_changes_nothing(
    admin: EngineAdminStub, host: Host, checkpoint: Path, vocab_size: int, path: str, code: str, words: str
) -> None:
    before = await info_of(admin)
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    async with Peer(host.address) as peer:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
            await admin.ReloadWeights(ReloadWeightsRequest(path=path or str(checkpoint)))
        assert refusal.value.code().name == code
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
            await admin.CheckWeights(ReloadWeightsRequest(path=path or str(checkpoint)))
        assert refusal.value.code().name == code
        assert await info_of(admin) == before
        await peer.send(make_add(1, [3], 5))
        received = await peer.read_until_finished([1])
        assert received.token_ids[1] == expected_tokens([3], 5, VOCAB_SIZE)


async def test_a_check_changes_nothing(admin: EngineAdminStub, host: Host, checkpoint: Path) -> None:
    before = await info_of(admin)
    await admin.CheckWeights(ReloadWeightsRequest(path=str(checkpoint)))
    assert await info_of(admin) == before


async def test_a_reload_that_fails_halfway_leaves_the_engine_asleep_until_another_succeeds(
    socket_dir: Path, checkpoint: Path
) -> None:
    class FailingOnce(HashWorker):
        has_failed = False

        def reload_weights(self, path: str) -> None:
            if not FailingOnce.has_failed:
                FailingOnce.has_failed = True
                raise OSError("the disk failed")
            super().reload_weights(path)

    async with (
        running_engine(make_settings(socket_dir), FailingOnce) as host,
        ready_channel(host.address) as channel,
    ):
        admin = EngineAdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="the disk failed; the engine has no weights now") as failure:
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await admin.IsSleeping(engine_pb2.IsSleepingRequest())).sleeping
        async with Peer(host.address) as peer:
            await peer.send(make_add(1, [3], 5))
            for call in (admin.Resume(engine_pb2.ResumeRequest()), admin.WakeUp(WakeUpRequest())):
                with pytest.raises(grpc.aio.AioRpcError, match=r"asleep|no weights"):
                    await call
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
            await admin.WakeUp(WakeUpRequest())
        await can_serve(host)


async def test_an_engine_whose_checkpoint_changes_while_it_is_loaded_ends(socket_dir: Path, checkpoint: Path) -> None:
    """It would serve the one checkpoint's weights under the other one's fingerprint."""

    class Overtaken(HashWorker):
        def reload_weights(self, path: str) -> None:
            (checkpoint / "model.safetensors").write_bytes(b"still other weights")
            super().reload_weights(path)

    async with running_engine(make_settings(socket_dir), Overtaken) as host, ready_channel(host.address) as channel:
        admin = EngineAdminStub(channel)
        before = await info_of(admin)
        with pytest.raises(grpc.aio.AioRpcError, match="changed while they were loaded"):
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        assert "changed while they were loaded" in str(await host.failure.take())
        assert await info_of(admin) == before


async def can_serve(host: Host) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [3], 5))
        received = await peer.read_until_finished([1])
        assert received.token_ids[1] == expected_tokens([3], 5, VOCAB_SIZE)


async def test_a_file_that_cannot_be_read_is_the_caller_s_error_and_changes_nothing(
    admin: EngineAdminStub, host: Host, checkpoint: Path
) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(checkpoint / "blob")
    before = await info_of(admin)
    with pytest.raises(grpc.aio.AioRpcError, match=r"model\.safetensors cannot be read: No such file") as refusal:
        await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await info_of(admin) == before
    await can_serve(host)


async def test_an_error_of_the_disk_is_ours_and_changes_nothing(
    admin: EngineAdminStub, host: Host, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    before = await info_of(admin)
    with monkeypatch.context() as patch:
        patch.setattr(weights.checkpoint, "weights_fingerprint", fail)
        with pytest.raises(grpc.aio.AioRpcError, match="internal error") as failure:
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert await info_of(admin) == before
    await can_serve(host)
