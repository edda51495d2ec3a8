"""The KV port, as a reader meets it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.services.engine.kv.kv_fakes import LAYOUT, LEASE, FakeCore, owning_core
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer, KVProgress, KVRelease, KVRenew
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.engine.kv.kv_front import KVTransferServicer, serve_kv
from tokenloom.services.engine.kv.kv_loads import KVLink
from tokenloom.services.engine.kv.kv_peers import read_failure
from tokenloom.services.runtime.host.host_dependencies import Network
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.kv_transfer_pb2 import AcquireRequest, ProgressRequest, ReleaseRequest, RenewRequest
from tokenloom.v1.kv_transfer_pb2_grpc import KVTransferStub
from tokenloom.v1.types_pb2 import Fingerprint

EPOCH = 77
ACQUISITION = b"reading"


@pytest.fixture
def core() -> FakeCore:
    return owning_core(10)


@pytest.fixture
async def stub(core: FakeCore, socket_dir: Path) -> AsyncIterator[Any]:
    link = KVLink(core)
    servicer = KVTransferServicer(link, EPOCH, Fingerprint(weights=b"ours"))
    server = serve_kv(Network(), f"unix:{socket_dir}/kv", servicer, None, insecure=False)
    await server.start()
    answering = asyncio.create_task(link.run(lambda verify: None))
    async with open_channel(server.address) as channel:
        yield KVTransferStub(channel)
    await server.close(0)
    answering.cancel()


def acquire(**fields: Any) -> AcquireRequest:
    values = {
        "lease_id": LEASE,
        "engine_epoch": EPOCH,
        "kv_layout": LAYOUT,
        "prompt_digest": bytes(32),
        "transports": ["shm"],
    }
    return AcquireRequest(**{**values, **fields})


async def test_a_lease_can_be_taken_up_followed_renewed_and_released(stub: Any, core: FakeCore) -> None:
    answer = await stub.Acquire(acquire())
    assert (answer.transport, answer.endpoint) == ("shm", b"there")
    assert (list(answer.block_ids), list(answer.generations)) == ([0, 1, 2], [9, 9, 9])
    assert answer.ttl.seconds == 30
    following = stub.Progress(ProgressRequest(acquisition_id=answer.acquisition_id, engine_epoch=EPOCH))
    assert [message.tokens_ready async for message in following] == [10]
    renewed = await stub.Renew(RenewRequest(acquisition_id=answer.acquisition_id, engine_epoch=EPOCH))
    assert renewed.ttl.seconds == 30
    release = ReleaseRequest(acquisition_id=answer.acquisition_id, engine_epoch=EPOCH, generations=answer.generations)
    verdict = await stub.Release(release)
    assert (verdict.valid, verdict.reason, list(verdict.checksums)) == (True, "", [5, 5, 5])
    assert (await core.noted(KVRelease)).generations == [9, 9, 9]


async def test_kv_of_other_weights_is_not_read(stub: Any, core: FakeCore) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="weights are not those of the reader") as refusal:
        await stub.Acquire(acquire(weights=b"theirs"))
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert read_failure(refusal.value).reason == "weights"
    assert not core.has_noted(KVAcquire)
    for weights in (b"", b"ours"):
        assert (await stub.Acquire(acquire(weights=weights))).transport == "shm"


async def test_progress_tells_each_advance_once_until_all_is_ready(stub: Any, core: FakeCore) -> None:
    calls: list[KVProgress] = []
    core.answers[KVProgress] = calls.append  # type: ignore[assignment]
    following = stub.Progress(ProgressRequest(acquisition_id=ACQUISITION, engine_epoch=EPOCH))
    seen = []
    for ready in (4, 8, 10):
        call = await core.noted(KVProgress)
        assert call.tokens_seen == (seen[-1] if seen else 0)
        core.say(KVAnswer(call.call_id, tokens_ready=ready, num_tokens=10))
        seen.append((await following.read()).tokens_ready)
    assert seen == [4, 8, 10]
    assert await following.read() is grpc.aio.EOF


@pytest.mark.parametrize("seen", [0, 4])
async def test_a_lease_that_ends_ends_its_progress(stub: Any, core: FakeCore, seen: int) -> None:
    def answer(call: KVProgress) -> KVAnswer:
        if call.tokens_seen < seen:
            return KVAnswer(call.call_id, tokens_ready=seen, num_tokens=10)
        return KVAnswer(call.call_id, failure="lease_revoked")

    core.answers[KVProgress] = answer
    following = stub.Progress(ProgressRequest(acquisition_id=ACQUISITION, engine_epoch=EPOCH))
    with pytest.raises(grpc.aio.AioRpcError) as end:
        async for _ in following:
            pass
    assert end.value.code() is grpc.StatusCode.NOT_FOUND
    assert read_failure(end.value).reason == "lease_revoked"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("not_found", "NOT_FOUND"),
        ("lease_expired", "NOT_FOUND"),
        ("lease_revoked", "NOT_FOUND"),
        ("layout", "FAILED_PRECONDITION"),
        ("digest", "FAILED_PRECONDITION"),
        ("transport", "FAILED_PRECONDITION"),
    ],
)
async def test_a_refusal_reaches_the_reader_with_its_reason(stub: Any, core: FakeCore, failure: str, code: str) -> None:
    core.answers[KVAcquire] = lambda call: KVAnswer(call.call_id, failure=failure, detail="f32, not bf16")
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Acquire(acquire())
    assert refusal.value.code().name == code
    error = read_failure(refusal.value)
    assert isinstance(error, KVTransferError)
    assert (error.reason, error.detail) == (failure, "f32, not bf16")


async def test_another_incarnation_is_lost_with_its_leases(stub: Any, core: FakeCore) -> None:
    reading = {"acquisition_id": ACQUISITION, "engine_epoch": EPOCH + 1}
    for call in (
        stub.Acquire(acquire(engine_epoch=EPOCH + 1)),
        stub.Progress(ProgressRequest(**reading)).read(),
        stub.Renew(RenewRequest(**reading)),
        stub.Release(ReleaseRequest(**reading)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert read_failure(refusal.value).reason == "owner_lost"


@pytest.mark.parametrize(
    "fields",
    [
        {"lease_id": b""},
        {"lease_id": bytes(17)},
        {"prompt_digest": b""},
        {"prompt_digest": bytes(33)},
        {"transports": []},
        {"transports": ["shm"] * 17},
        {"transports": ["s" * 1000]},
        {"kv_layout": "l" * 1000},
        {"skip_tokens": 4},
    ],
)
async def test_malformed_handles_never_reach_the_core(stub: Any, core: FakeCore, fields: dict[str, object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Acquire(acquire(**fields))
    assert refusal.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert not core.has_noted(KVAcquire)


@pytest.mark.parametrize("acquisition_id", [b"", bytes(65)])
async def test_malformed_readings_never_reach_the_core(stub: Any, core: FakeCore, acquisition_id: bytes) -> None:
    reading = {"acquisition_id": acquisition_id, "engine_epoch": EPOCH}
    for call in (
        stub.Progress(ProgressRequest(**reading)).read(),
        stub.Renew(RenewRequest(**reading)),
        stub.Release(ReleaseRequest(**reading)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not any(core.has_noted(kind) for kind in (KVProgress, KVRenew, KVRelease))


async def test_the_port_is_closed_to_other_machines() -> None:
    servicer = KVTransferServicer(KVLink(FakeCore()), EPOCH)
    with pytest.raises(InvalidArgument, match="kv_listen"):
        serve_kv(Network(), "0.0.0.0:0", servicer, None, insecure=False)
    for listen in ("127.0.0.1:0", "[::1]:0"):
        server = serve_kv(Network(), listen, servicer, None, insecure=False)
        assert not server.address.endswith(":0")
        await server.close(0)
