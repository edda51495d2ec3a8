"""Calls another engine to read KV that it holds under a lease: acquire, progress, renew, release."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc.aio

from tokenloom.engine_core.data.kv_messages import KV_FAILURES, KVTarget
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request import errors, wire_errors
from tokenloom.v1 import kv_transfer_pb2

from .kv_peers import Stub

T = TypeVar("T")

CALL_SECONDS = 6.0
"""Timeout of a call that the owner normally answers within 5 ms. Its event loop may be busy for 5 s; an owner that was
stopped or cut off is noticed by gRPC's pings."""
RENEW_SECONDS = 5.0
"""How often a lease is renewed, unless it lasts for less than three times as long."""
_LEAST_RENEW_SECONDS = 0.1
"""A lease is not renewed more often, however short its owner says that it lasts."""
_REASON_OF_CODE = {
    errors.Code.UNAVAILABLE: "owner_lost",
    errors.Code.CANCELLED: "owner_lost",
    errors.Code.DEADLINE_EXCEEDED: "timeout",
    errors.Code.NOT_FOUND: "not_found",
}


@dataclass(frozen=True)
class Verdict:
    """Holds the owner's answer after the copy."""

    valid: bool
    reason: str = ""
    checksums: Sequence[int] = ()


class Reading:
    """Holds an acquired lease. Every method raises ``KVTransferError`` if the owner refuses or is silent."""

    def __init__(self, stub: Stub, epoch: int, target: KVTarget, renew_seconds: float) -> None:
        self._stub = stub
        self._epoch = epoch
        self._renew_seconds = renew_seconds
        self.target = target

    @classmethod
    async def acquire(
        cls,
        stub: Stub,
        request: kv_transfer_pb2.AcquireRequest,
        *,
        num_tokens: int,
        block_size: int,
        num_kv_groups: int = 1,
    ) -> "Reading":
        """Acquire a lease on the KV of ``num_tokens`` tokens."""
        answer = await _call(lambda: stub.Acquire(request, timeout=CALL_SECONDS))
        _check_answer(answer, request, num_blocks=-(-num_tokens // block_size) * num_kv_groups)
        target = KVTarget(
            acquisition_id=answer.acquisition_id,
            transport=answer.transport,
            endpoint=answer.endpoint,
            block_ids=list(answer.block_ids),
            generations=list(answer.generations),
            num_tokens=num_tokens,
            checksums=list(answer.checksums),
        )
        # A third of the lease: two renewals in a row may be lost before it ends.
        renew_seconds = max(_LEAST_RENEW_SECONDS, min(RENEW_SECONDS, answer.ttl.ToNanoseconds() / 3e9))
        return cls(stub, request.engine_epoch, target, renew_seconds)

    async def progress(self) -> AsyncIterator[int]:
        """Yield the number of tokens that are ready, whenever it grows, until all are."""
        request = kv_transfer_pb2.ProgressRequest(acquisition_id=self.target.acquisition_id, engine_epoch=self._epoch)
        call = self._stub.Progress(request)
        try:
            tokens_ready = 0
            while tokens_ready < self.target.num_tokens:
                answer = await _call(call.read, tries=1)
                if not isinstance(answer, kv_transfer_pb2.ProgressResponse):
                    raise KVTransferError("owner_lost", "the owner ended Progress before the whole prompt was ready")
                # Only growth is passed on, because each progress gives the load its full time again: an owner that is
                # stuck and repeats itself would keep a request waiting for ever.
                if answer.tokens_ready > tokens_ready:
                    tokens_ready = answer.tokens_ready
                    yield tokens_ready
        finally:
            call.cancel()

    async def keep(self) -> NoReturn:
        """Renew the lease, without end."""
        request = kv_transfer_pb2.RenewRequest(acquisition_id=self.target.acquisition_id, engine_epoch=self._epoch)
        while True:
            await asyncio.sleep(self._renew_seconds)
            await _call(lambda: self._stub.Renew(request, timeout=CALL_SECONDS))

    async def release(self) -> Verdict:
        """End the lease. The verdict says whether its blocks stayed unchanged during the copy."""
        request = kv_transfer_pb2.ReleaseRequest(
            acquisition_id=self.target.acquisition_id,
            engine_epoch=self._epoch,
            generations=self.target.generations,
        )
        answer = await _call(lambda: self._stub.Release(request, timeout=CALL_SECONDS))
        if answer.valid and len(answer.checksums) not in (0, len(self.target.block_ids)):
            return Verdict(valid=False, reason="checksum")  # it says nothing about some of the blocks
        reason = answer.reason if answer.reason in KV_FAILURES else "not_found"  # it becomes a label
        return Verdict(answer.valid, "" if answer.valid else reason, list(answer.checksums))


async def _call(call: Callable[[], Awaitable[T]], tries: int = 2) -> T:
    """Make a call, and repeat it once if the connection broke; all calls are idempotent."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        # gRPC's own retries are off in the mesh, and a lease must not be lost to a single broken connection.
        if tries > 1 and error.code() is grpc.StatusCode.UNAVAILABLE:
            return await _call(call, tries - 1)
        raise read_failure(error) from None


def _check_answer(
    answer: kv_transfer_pb2.AcquireResponse, request: kv_transfer_pb2.AcquireRequest, *, num_blocks: int
) -> None:
    """Check what the owner answered before the core relies on it."""
    if answer.ttl.ToNanoseconds() <= 0:
        raise KVTransferError("lease_expired", "the owner granted a lease that lasts for no time")
    if answer.transport not in request.transports:
        raise KVTransferError("transport", f"the owner chose transport {answer.transport!r}, which was not offered")
    counts = len(answer.block_ids), len(answer.generations), len(answer.checksums) or num_blocks
    if counts != (num_blocks, num_blocks, num_blocks):
        raise KVTransferError(
            "layout", f"the owner sent {counts} blocks, generations and checksums; expected {num_blocks} of each"
        )


def read_failure(cause: grpc.aio.AioRpcError) -> KVTransferError:
    """Return the failure that a gRPC error stands for. An owner with an unknown answer counts as lost."""
    error = wire_errors.from_rpc(cause)
    reason = error.reason.lower()
    if reason not in KV_FAILURES:
        reason = _REASON_OF_CODE.get(error.code, "owner_lost")
    return KVTransferError(reason, error.message)
