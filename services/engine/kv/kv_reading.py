"""One reading of KV that another engine holds under a lease: acquire, follow, renew, release."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import grpc.aio

from tokenloom.engine_core.kv_transfer.kv_messages import KV_FAILURES, KVTarget
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request import errors
from tokenloom.v1 import kv_transfer_pb2

from .kv_peers import Stub

T = TypeVar("T")

CALL_SECONDS = 2.0
"""Bound of a call that the owner answers within some 5 ms."""
RENEW_SECONDS = 5.0
_REASON_OF_CODE = {
    grpc.StatusCode.UNAVAILABLE: "owner_lost",
    grpc.StatusCode.CANCELLED: "owner_lost",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.NOT_FOUND: "not_found",
}


@dataclass(frozen=True)
class Verdict:
    """What the owner said after the copy."""

    valid: bool
    reason: str = ""
    checksums: Sequence[int] = ()


class Reading:
    """An acquired lease, until it is released. Every method raises ``KVTransferError`` for what the owner refuses, and
    for an owner that does not answer."""

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
    ) -> "Reading":
        """Takes up a lease on the KV of ``num_tokens`` tokens."""
        answer = await _call(lambda: stub.Acquire(request, timeout=CALL_SECONDS))
        _check_answer(answer, request, num_blocks=-(-num_tokens // block_size))
        target = KVTarget(
            acquisition_id=answer.acquisition_id,
            transport=answer.transport,
            endpoint=answer.endpoint,
            block_ids=list(answer.block_ids),
            generations=list(answer.generations),
            num_tokens=num_tokens,
            checksums=list(answer.checksums),
        )
        return cls(stub, request.engine_epoch, target, min(RENEW_SECONDS, answer.ttl.ToNanoseconds() / 3e9))

    async def progress(self) -> AsyncIterator[int]:
        """How many tokens are ready, each time there are more, until all are."""
        request = kv_transfer_pb2.ProgressRequest(acquisition_id=self.target.acquisition_id, engine_epoch=self._epoch)
        call = self._stub.Progress(request)
        try:
            tokens_ready = 0
            while tokens_ready < self.target.num_tokens:
                answer = await _call(call.read, tries=1)
                if not isinstance(answer, kv_transfer_pb2.ProgressResponse):
                    raise KVTransferError("owner_lost", "progress ended before the prompt did")
                tokens_ready = answer.tokens_ready
                yield tokens_ready
        finally:
            call.cancel()

    async def keep(self) -> NoReturn:
        """Renews the lease for ever."""
        request = kv_transfer_pb2.RenewRequest(acquisition_id=self.target.acquisition_id, engine_epoch=self._epoch)
        while True:
            await asyncio.sleep(self._renew_seconds)
            await _call(lambda: self._stub.Renew(request, timeout=CALL_SECONDS))

    async def release(self) -> Verdict:
        """Ends the lease; whether its blocks were the same all the while."""
        request = kv_transfer_pb2.ReleaseRequest(
            acquisition_id=self.target.acquisition_id,
            engine_epoch=self._epoch,
            generations=self.target.generations,
        )
        answer = await _call(lambda: self._stub.Release(request, timeout=CALL_SECONDS))
        reason = answer.reason if answer.reason in KV_FAILURES else "not_found"  # it becomes a label
        return Verdict(answer.valid, "" if answer.valid else reason, list(answer.checksums))


async def _call(call: Callable[[], Awaitable[T]], tries: int = 2) -> T:
    """Once more when the link broke: every call may be repeated."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        if tries > 1 and error.code() is grpc.StatusCode.UNAVAILABLE:
            return await _call(call, tries - 1)
        raise read_failure(error) from None


def _check_answer(
    answer: kv_transfer_pb2.AcquireResponse, request: kv_transfer_pb2.AcquireRequest, *, num_blocks: int
) -> None:
    """What an owner may get wrong is not for the core to stumble over."""
    if answer.transport not in request.transports:
        raise KVTransferError("transport", f"the owner chose transport {answer.transport!r}, which was not offered")
    counts = len(answer.block_ids), len(answer.generations), len(answer.checksums) or num_blocks
    if counts != (num_blocks, num_blocks, num_blocks):
        raise KVTransferError("layout", f"the owner named {counts} blocks, generations and checksums, not {num_blocks}")


def read_failure(cause: grpc.aio.AioRpcError) -> KVTransferError:
    """What a failed call means to the reader. An owner that answers with nonsense is as good as lost."""
    error = errors.from_rpc(cause)
    reason = error.reason.lower()
    if reason not in KV_FAILURES:
        reason = _REASON_OF_CODE.get(error.code, "owner_lost")
    return KVTransferError(reason, error.message)
