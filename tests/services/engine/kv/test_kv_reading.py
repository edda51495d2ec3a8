import asyncio
from collections.abc import Sequence

import pytest
from google.protobuf.duration_pb2 import Duration

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.services.engine.kv import kv_loads as kv_reading
from tokenloom.services.engine.kv.kv_peers import RENEW_SECONDS, Reading
from tokenloom.v1 import kv_transfer_pb2

REQUEST = kv_transfer_pb2.AcquireRequest(transports=["shm"])


class FakeStub:
    """An owner that answers with so many blocks, a lease that lasts so long, and these checksums in the end."""

    def __init__(self, num_blocks: int, ttl: Duration | None = None, checksums: Sequence[int] = ()) -> None:
        self._num_blocks = num_blocks
        self._ttl = ttl or Duration(seconds=30)
        self._checksums = checksums
        self.num_renewals = 0

    async def Acquire(self, request: kv_transfer_pb2.AcquireRequest, timeout: float) -> kv_transfer_pb2.AcquireResponse:
        blocks = range(self._num_blocks)
        return kv_transfer_pb2.AcquireResponse(transport="shm", block_ids=blocks, generations=blocks, ttl=self._ttl)

    async def Renew(self, request: kv_transfer_pb2.RenewRequest, timeout: float) -> kv_transfer_pb2.RenewResponse:
        self.num_renewals += 1
        await asyncio.sleep(0)
        return kv_transfer_pb2.RenewResponse(ttl=self._ttl)

    def Progress(self, request: kv_transfer_pb2.ProgressRequest) -> "FakeProgress":
        return FakeProgress([0, 16, 16, 8, 16, 48])

    async def Release(self, request: kv_transfer_pb2.ReleaseRequest, timeout: float) -> kv_transfer_pb2.ReleaseResponse:
        return kv_transfer_pb2.ReleaseResponse(valid=True, checksums=self._checksums)


class FakeProgress:
    """A stream of how many tokens are ready."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = iter(counts)

    async def read(self) -> kv_transfer_pb2.ProgressResponse:
        return kv_transfer_pb2.ProgressResponse(tokens_ready=next(self._counts))

    def cancel(self) -> None:
        pass


async def acquire(stub: FakeStub, num_tokens: int = 48) -> Reading:
    return await Reading.acquire(stub, REQUEST, num_tokens=num_tokens, block_size=16)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_kv_groups", "num_blocks"), [(1, 3), (4, 12)])
async def test_there_is_a_block_for_each_group(num_kv_groups: int, num_blocks: int) -> None:
    numbers = {"num_tokens": 33, "block_size": 16, "num_kv_groups": num_kv_groups}
    reading = await Reading.acquire(FakeStub(num_blocks), REQUEST, **numbers)  # type: ignore[arg-type]
    assert reading.target.block_ids == list(range(num_blocks))
    with pytest.raises(KVTransferError, match="expected"):
        await Reading.acquire(FakeStub(num_blocks - 1), REQUEST, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl", [Duration(), Duration(seconds=-5), Duration(seconds=-(2**63))])
async def test_a_lease_that_lasts_for_no_time_is_none(ttl: Duration) -> None:
    with pytest.raises(KVTransferError, match="lasts for no time") as caught:
        await acquire(FakeStub(3, ttl))
    assert caught.value.reason == "lease_expired"


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [
        (Duration(nanos=1), 0.1),
        (Duration(seconds=3), 1.0),
        (Duration(seconds=30), RENEW_SECONDS),
        (Duration(seconds=2**63 - 1), RENEW_SECONDS),
    ],
)
async def test_a_lease_is_renewed_neither_more_often_nor_more_seldom_than_makes_sense(
    ttl: Duration, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = FakeStub(3, ttl)
    reading = await acquire(stub)
    slept: list[float] = []

    async def sleep(for_seconds: float) -> None:
        slept.append(for_seconds)
        if stub.num_renewals == 3:
            raise KVTransferError("timeout", "enough")

    monkeypatch.setattr(kv_reading.asyncio, "sleep", sleep)
    with pytest.raises(KVTransferError):
        await reading.keep()
    assert set(slept) - {0} == {seconds}


@pytest.mark.parametrize(("count", "valid"), [(0, True), (1, False), (2, False), (3, True), (4, False)])
async def test_checksums_are_for_all_blocks_or_for_none(count: int, valid: bool) -> None:
    reading = await acquire(FakeStub(3, checksums=[7] * count))
    verdict = await reading.release()
    assert verdict.valid is valid
    assert verdict.reason == ("" if valid else "checksum")


async def test_only_what_grows_is_progress() -> None:
    """A load that makes none ends after a while: an owner that repeats itself must not keep it alive."""
    reading = await acquire(FakeStub(3))
    assert [tokens_ready async for tokens_ready in reading.progress()] == [16, 48]
