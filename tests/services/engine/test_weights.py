import asyncio
import errno
import json
import secrets
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save

from tests.ready_channel import ready_channel
from tests.services.engine.control.test_coordinator_link import is_serving, running_coordinator, see
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_add, make_settings, running_engine
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine import weights
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import engine_pb2
from tokenloom.v1.coordinator_pb2 import ENGINE_STATE_PAUSED
from tokenloom.v1.engine_pb2 import (
    PAUSE_MODE_ABORT,
    PAUSE_MODE_KEEP,
    PAUSE_MODE_UNSPECIFIED,
    PAUSE_MODE_WAIT,
    ReloadWeightsRequest,
    SleepRequest,
    StageWeightsRequest,
    WakeUpRequest,
)
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import FINISH_REASON_ABORT


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


async def test_what_a_pause_waits_for_ends_with_the_old_weights(
    admin: EngineAdminStub, host: Host, checkpoint: Path
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [8] * 9, 200))
        await peer.read_tokens()
        pause = admin.Pause(engine_pb2.PauseRequest(mode=PAUSE_MODE_WAIT))
        while (await info_of(admin)).pause_mode != PAUSE_MODE_WAIT:
            pass
        with pytest.raises(grpc.aio.AioRpcError, match="the pause waits for") as refusal:
            await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        received = await peer.read_until_finished([1])
        assert len(received.token_ids[1]) == 200
    await pause
    await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint)))
    assert (await info_of(admin)).fingerprint.weights == weights_fingerprint(checkpoint)


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


@pytest.mark.parametrize(
    ("mode", "reason"), [(PAUSE_MODE_WAIT, ""), (PAUSE_MODE_ABORT, "abort"), (PAUSE_MODE_KEEP, "WEIGHTS_REPLACED")]
)
async def test_a_mode_says_what_becomes_of_live_requests(
    admin: EngineAdminStub, host: Host, checkpoint: Path, mode: engine_pb2.PauseMode, reason: str
) -> None:
    async with Peer(host.address) as peer:
        await peer.send(make_add(1, [8] * 9, 60))
        await peer.read_tokens()
        await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint), mode=mode))
        finished = (await peer.read_until_finished([1])).finished[1]
        tokens = peer.received.token_ids[1]
    expected = expected_tokens([8] * 9, 60, VOCAB_SIZE)
    assert tokens == expected[: len(tokens)]
    assert (len(tokens) == 60) == (mode == PAUSE_MODE_WAIT)
    assert finished.error.reason == ("" if reason == "abort" else reason)
    assert (finished.reason == FINISH_REASON_ABORT) == (reason == "abort")
    info = await info_of(admin)
    assert (info.pause_mode, info.fingerprint.weights) == (PAUSE_MODE_UNSPECIFIED, weights_fingerprint(checkpoint))
    with pytest.raises(grpc.aio.AioRpcError, match="mode must be"):
        await admin.ReloadWeights(ReloadWeightsRequest(path=str(checkpoint), mode=9))  # type: ignore[arg-type]


@pytest.fixture
async def staging(socket_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[EngineAdminStub, Host]]:
    """An engine that takes weights."""
    settings = make_settings(socket_dir, staged_weights_dir=str(tmp_path / "staged"))
    async with running_engine(settings) as host, ready_channel(host.address) as channel:
        yield EngineAdminStub(channel), host


def other_demo() -> bytes:
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    return save({name: tensor + 1 for name, tensor in tensors.items()})


async def pieces(data: bytes, size: int = 1 << 16) -> AsyncIterator[StageWeightsRequest]:
    for start in range(0, len(data), size):
        yield StageWeightsRequest(data=data[start : start + size])


async def test_streamed_weights_are_loaded_by_their_path(staging: tuple[EngineAdminStub, Host], tmp_path: Path) -> None:
    admin, host = staging
    stage: Any = admin.StageWeights
    data = other_demo()
    answer = await stage(pieces(data))
    assert (Path(answer.path) / "model.safetensors").read_bytes() == data
    assert (await info_of(admin)).fingerprint.weights == b"", "nothing is loaded yet"
    await admin.ReloadWeights(ReloadWeightsRequest(path=answer.path))
    assert (await info_of(admin)).fingerprint.weights == answer.weights == weights_fingerprint(Path(answer.path))
    again = await stage(pieces(data))
    assert again == answer
    await can_serve(host)


async def test_weights_of_shared_memory(staging: tuple[EngineAdminStub, Host]) -> None:
    admin, _ = staging
    stage: Any = admin.StageWeights
    shared = Path("/dev/shm") / f"tokenloom-test-{secrets.token_hex(6)}"
    try:
        shared.write_bytes(other_demo())
        answer = await stage(iter([StageWeightsRequest(shared_memory=shared.name)]))
    finally:
        shared.unlink()
    with safe_open(Path(answer.path) / "model.safetensors", "pt") as file:
        assert len(file.keys()) > 3
    await admin.ReloadWeights(ReloadWeightsRequest(path=answer.path))
    with pytest.raises(grpc.aio.AioRpcError, match="alone in the first message"):
        await stage(iter([StageWeightsRequest(shared_memory="name", data=b"x")]))


async def test_a_stream_that_is_cut_leaves_the_old_weights(
    staging: tuple[EngineAdminStub, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, host = staging
    stage: Any = admin.StageWeights
    before, data = await info_of(admin), other_demo()
    call = stage()
    await call.write(StageWeightsRequest(data=data[: len(data) // 2]))
    refusal = await code_of(stage(pieces(data)))
    while refusal != "RESOURCE_EXHAUSTED":  # the first stream may not have begun
        refusal = await code_of(stage(pieces(data)))
    call.cancel()
    async with asyncio.timeout(30):
        while any(entry.name.startswith(".part") for entry in (tmp_path / "staged").iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await code_of(stage(pieces(data[:-1]))) == "INVALID_ARGUMENT"
    assert await code_of(stage(pieces(data[:40] + b"x" + data[41:]))) == "INVALID_ARGUMENT"
    monkeypatch.setattr(weights, "STAGE_SECONDS", 0.05)
    call = stage()
    await call.write(StageWeightsRequest(data=data[:100]))
    assert await code_of(call) == "DEADLINE_EXCEEDED"
    assert not any(entry.name.startswith(".part") for entry in (tmp_path / "staged").iterdir())
    assert await info_of(admin) == before
    await can_serve(host)


async def code_of(call: Awaitable[object]) -> str:
    """The status with which a call ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_an_engine_without_a_folder_takes_no_weights(admin: EngineAdminStub) -> None:
    stage: Any = admin.StageWeights
    assert await code_of(stage(pieces(b"x" * 100))) == "FAILED_PRECONDITION"


def test_a_format_whose_tensors_are_not_replaced_is_refused_before_a_start(socket_dir: Path) -> None:
    with pytest.raises(ValueError, match="--staged-weights-dir: load_format is dummy"):
        make_settings(socket_dir, staged_weights_dir="/dev/shm/x", load_format="dummy")
