import pytest

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.services.engine.kv.kv_reading import Reading
from tokenloom.v1 import kv_transfer_pb2

REQUEST = kv_transfer_pb2.AcquireRequest(transports=["shm"])


class FakeStub:
    """An owner that answers with so many blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    async def Acquire(self, request: kv_transfer_pb2.AcquireRequest, timeout: float) -> kv_transfer_pb2.AcquireResponse:
        blocks = range(self._num_blocks)
        return kv_transfer_pb2.AcquireResponse(transport="shm", block_ids=blocks, generations=blocks)


@pytest.mark.parametrize(("num_kv_groups", "num_blocks"), [(1, 3), (4, 12)])
async def test_there_is_a_block_for_each_group(num_kv_groups: int, num_blocks: int) -> None:
    numbers = {"num_tokens": 33, "block_size": 16, "num_kv_groups": num_kv_groups}
    reading = await Reading.acquire(FakeStub(num_blocks), REQUEST, **numbers)  # type: ignore[arg-type]
    assert reading.target.block_ids == list(range(num_blocks))
    with pytest.raises(KVTransferError, match="expected"):
        await Reading.acquire(FakeStub(num_blocks - 1), REQUEST, **numbers)  # type: ignore[arg-type]
