"""Other engines as owners of KV: where each one serves it, channels to them, transports that reach them, and the leases
under which this engine reads."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio

from tokenloom.engine_core.data.kv_messages import LEASE_ENDS, KVTarget
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, kv_transfer_pb2, kv_transfer_pb2_grpc

T = TypeVar("T")
Stub: TypeAlias = "kv_transfer_pb2_grpc.KVTransferAsyncStub"

UNKNOWN_SECONDS = 0.5
"""How long to wait for an engine that this engine's view of the registry does not show yet."""
AVOID_SECONDS = 60.0
"""How long a transport that failed is avoided."""
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
_SAME_HOST = ("cuda", "shm")
"""Transports that work only on one host."""


@dataclass(frozen=True)
class Owner:
    """Describes an engine whose KV may be read."""

    engine_id: str
    epoch: int
    kv_address: str
    host: str

    @property
    def incarnation(self) -> str:
        """The key of what is opened to this incarnation, here and in the core."""
        return f"{self.engine_id}@{self.epoch}"


class EngineRegistry:
    """Watches the coordinator's registry of engines; keeps the last view while the coordinator is away."""

    def __init__(self, coordinator: grpc.aio.Channel | None) -> None:
        """``coordinator``: a channel to it; None without one, and then no engine is ever found."""
        self._coordinator = coordinator
        self._view = self._complete = RegistryView()  # the newest one, and the newest one that was complete
        self._changed = asyncio.Event()  # a new one for each message

    async def run(self) -> None:
        """Watch and reconnect, without end."""
        if self._coordinator is None:
            await asyncio.Event().wait()  # nothing to watch
        else:
            stub = coordinator_pb2_grpc.CoordinatorStub(self._coordinator)
            await watch_registry(stub, self.update, without_loads=True)

    def update(self, view: RegistryView) -> None:
        """Take a view of the registry after each of its changes. An incomplete one, of a coordinator that engines still
        re-join, removes none."""
        self._view = view
        if view.complete:
            self._complete = view
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def next_change(self) -> asyncio.Event:
        """Set by the next change."""
        return self._changed

    def has(self, owner: Owner) -> bool:
        """Return whether this incarnation of an engine is known."""
        found = (view.identity(owner.engine_id) for view in (self._view, self._complete))
        return any(identity is not None and identity.epoch == owner.epoch for identity in found)

    async def find(self, engine_id: str, epoch: int) -> Owner:
        """Return this incarnation of an engine. Raises ``KVTransferError`` (``owner_lost``) if it is not known."""
        try:
            async with asyncio.timeout(UNKNOWN_SECONDS):
                while (identity := self._identity(engine_id)) is None or identity.epoch != epoch:
                    await self._changed.wait()
        except TimeoutError:
            raise KVTransferError(
                "owner_lost", f"this incarnation of engine {engine_id!r} is not in the registry"
            ) from None
        if not identity.kv_address:
            raise KVTransferError("owner_lost", f"engine {engine_id!r} serves no KV")
        return Owner(identity.engine_id, identity.epoch, identity.kv_address, identity.host)

    def _identity(self, engine_id: str) -> coordinator_pb2.EngineIdentity | None:
        newest = self._view.identity(engine_id)
        return self._complete.identity(engine_id) if newest is None else newest


@dataclass(slots=True, eq=False)
class _Shared:
    channel: grpc.aio.Channel
    num_users: int = 0


class KVChannels:
    """Opens channels to KV ports on first use. When an incarnation has left the registry and is read no more, its
    channel is closed, and the core closes what it opened to that incarnation."""

    def __init__(
        self, registry: EngineRegistry, channels: Channels, on_left: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """``on_left``: called with incarnations, as :attr:`Owner.incarnation`, whose channels were closed."""
        self._registry = registry
        self._channels = channels
        self._on_left = on_left
        self._shared: dict[Owner, _Shared] = {}  # bounded by the engines that are known or still read

    @asynccontextmanager
    async def stub(self, owner: Owner) -> AsyncIterator[Stub]:
        """Provide a stub for an engine that serves KV."""
        shared = self._shared.get(owner)
        if shared is None:
            shared = self._shared[owner] = _Shared(self._channels.open(owner.kv_address, "engine"))
        shared.num_users += 1
        try:
            yield kv_transfer_pb2_grpc.KVTransferStub(shared.channel)
        finally:
            shared.num_users -= 1
            await self._prune()

    async def run(self) -> NoReturn:
        """Follow the registry, without end. Without it an idle engine would keep what belongs to dead ones."""
        while True:
            # Taken before the look: another engine may leave while what one had is being closed.
            changed = self._registry.next_change
            await self._prune()
            await changed.wait()

    async def close(self) -> None:
        """Close all channels, which ends calls in progress."""
        shared, self._shared = self._shared, {}
        for each in shared.values():
            await each.channel.close()

    async def _prune(self) -> None:
        unused = [
            owner for owner, shared in self._shared.items() if not shared.num_users and not self._registry.has(owner)
        ]
        closing = [self._shared.pop(owner).channel for owner in unused]  # at once: others prune during the waits
        if unused:
            await self._on_left([owner.incarnation for owner in unused])
        for channel in closing:
            await channel.close()


class KVPaths:
    """Chooses the transports to offer an owner. Some fail unexpectedly (containers on one host may not share memory),
    so a transport that failed is avoided for a while."""

    def __init__(self, transports: Sequence[str], host: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``transports``: of this engine, best first. ``host``: of this engine, as in ``EngineIdentity``."""
        self._transports = tuple(transports)
        self._host = host
        self._clock = clock
        self._failed: dict[tuple[str, int, str], float] = {}
        """By engine, epoch and transport: until when it is avoided. Past entries are dropped at the next failure."""

    def to(self, owner: Owner) -> list[str]:
        """Return the transports for this owner, best first; ones that failed recently only if no other is left."""
        near = [name for name in self._transports if owner.host == self._host or name not in _SAME_HOST]
        now = self._clock()
        return [name for name in near if self._failed.get((owner.engine_id, owner.epoch, name), now) <= now] or near

    def note_failure(self, owner: Owner, transport: str) -> None:
        """Avoid a transport for a while, because reading blocks of this owner with it failed."""
        now = self._clock()
        self._failed = {key: until for key, until in self._failed.items() if until > now}
        self._failed[owner.engine_id, owner.epoch, transport] = now + AVOID_SECONDS


@dataclass(frozen=True)
class ReleaseVerdict:
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
        has_states: bool = False,
        owner: str = "",
    ) -> "Reading":
        """Acquire a lease on the KV of ``num_tokens`` tokens, and with ``has_states`` on the slot with the state after
        them. ``owner``: as in :class:`KVTarget`."""
        answer = await _call(lambda: stub.Acquire(request, timeout=CALL_SECONDS))
        _check_answer(answer, request, num_blocks=-(-num_tokens // block_size) * num_kv_groups + has_states)
        target = KVTarget(
            acquisition_id=answer.acquisition_id,
            transport=answer.transport,
            endpoint=answer.endpoint,
            block_ids=list(answer.block_ids),
            generations=list(answer.generations),
            num_tokens=num_tokens,
            checksums=list(answer.checksums),
            owner=owner,
            layout=answer.divided_layout,
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

    async def itself(self) -> "Reading":
        """Return the lease, which is acquired."""
        return self

    async def release(self) -> ReleaseVerdict:
        """End the lease. The verdict says whether its blocks stayed unchanged during the copy."""
        request = kv_transfer_pb2.ReleaseRequest(
            acquisition_id=self.target.acquisition_id,
            engine_epoch=self._epoch,
            generations=self.target.generations,
        )
        answer = await _call(lambda: self._stub.Release(request, timeout=CALL_SECONDS))
        if answer.valid and len(answer.checksums) not in (0, len(self.target.block_ids)):
            return ReleaseVerdict(valid=False, reason="checksum")  # it says nothing about some of the blocks
        reason = answer.reason if answer.reason in LEASE_ENDS else "not_found"  # it becomes a label
        return ReleaseVerdict(answer.valid, "" if answer.valid else reason, list(answer.checksums))


async def _call(call: Callable[[], Awaitable[T]], tries: int = 2) -> T:
    """Make a call, and repeat it once if the connection broke; all calls are idempotent."""
    try:
        return await call()
    except grpc.aio.AioRpcError as error:
        # gRPC's own retries are off in the mesh, and a lease must not be lost to a single broken connection.
        if tries > 1 and wire_errors.code_of(error) is grpc.StatusCode.UNAVAILABLE:
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
    if reason not in LEASE_ENDS:
        reason = _REASON_OF_CODE.get(error.code, "owner_lost")
    return KVTransferError(reason, error.message)
