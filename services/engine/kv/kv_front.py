"""Joins the front's parts that read KV from other engines and serve KV to them, under leases that the core holds."""

import asyncio
import functools
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2

from tokenloom.engine_core.data.kv_messages import (
    ENDS_SOON,
    REQUEST_ENDED,
    KVAcquire,
    KVAnswer,
    KVProgress,
    KVRelease,
    KVRenew,
)
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.gpu_worker.kv_connector.kv_transports import expanded
from tokenloom.request import errors
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, TokenloomError, Unimplemented
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.host_dependencies import Network, Port
from tokenloom.services.runtime.host.limits import GrpcLimits
from tokenloom.services.runtime.host.servicer_edge import Edge
from tokenloom.services.runtime.peers.callers import check_caller
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.services.runtime.tasks import Tasks, first_of
from tokenloom.v1 import coordinator_pb2, engine_pb2, kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2

from ..core.core_link import CoreLink
from ..records.attempt import Attempt
from ..records.core_request import LEASE_ID_BYTES
from ..records.engine_metrics import MoveReason
from ..records.engine_settings import EngineSettings
from ..records.load import LoadTracker
from .kv_loads import KVLink, KVLoads, ReaderConfig
from .kv_peers import EngineRegistry

log = logging.getLogger(__name__)

DIGEST_BYTES = 32
_MAX_ACQUISITION_ID_BYTES = 64
_MAX_TRANSPORTS = 16
_MAX_NAME_CHARS = 256
_LIMITS = GrpcLimits(calls=4096)
"""Each reading of an incomplete prefill keeps a call open."""
_NOT_FOUND = ("not_found", "lease_expired", "lease_revoked", REQUEST_ENDED)


class KVTransferServicer(kv_transfer_pb2_grpc.KVTransferServicer):
    """Checks calls and passes them to the core. Errors are raised; the servicer edge turns them into statuses."""

    def __init__(self, link: KVLink, epoch: int, fingerprint: types_pb2.Fingerprint | None = None) -> None:
        """``epoch``: this engine's incarnation. Leases of an earlier incarnation ended with it. ``fingerprint``: what
        it serves, which changes with its weights."""
        self._link = link
        self._epoch = epoch
        self._fingerprint = fingerprint or types_pb2.Fingerprint()

    async def Acquire(self, request: kv_transfer_pb2.AcquireRequest, context: Any) -> kv_transfer_pb2.AcquireResponse:
        self._check_epoch(request.engine_epoch)
        _check_acquire(request)
        if request.weights and request.weights != self._fingerprint.weights:
            # Placement sees to it too, but weights may change between a pick and its arrival; the reader would cache
            # the blocks under the hashes of its own.
            raise _error("weights", "the owner's weights are not those of the reader, which computes the prompt")
        answer = _valid(
            await self._link.call(
                lambda call_id: KVAcquire(
                    call_id, request.lease_id, request.kv_layout, request.prompt_digest, list(request.transports)
                )
            )
        )
        target = answer.target
        assert target is not None, "acquired, but no target"
        return kv_transfer_pb2.AcquireResponse(
            acquisition_id=target.acquisition_id,
            transport=target.transport,
            endpoint=target.endpoint,
            block_ids=target.block_ids,
            generations=target.generations,
            checksums=target.checksums,
            ttl=_duration(answer.ttl_seconds),
            divided_layout=target.layout,
        )

    async def Progress(
        self, request: kv_transfer_pb2.ProgressRequest, context: Any
    ) -> AsyncIterator[kv_transfer_pb2.ProgressResponse]:
        self._check_epoch(request.engine_epoch)
        _check_acquisition(request.acquisition_id)
        seen, is_complete = 0, False
        while not is_complete:
            make = functools.partial(KVProgress, acquisition_id=request.acquisition_id, tokens_seen=seen)
            answer = _valid(await self._link.call(make))
            seen, is_complete = answer.tokens_ready, answer.tokens_ready >= answer.num_tokens
            yield kv_transfer_pb2.ProgressResponse(tokens_ready=seen)

    async def Renew(self, request: kv_transfer_pb2.RenewRequest, context: Any) -> kv_transfer_pb2.RenewResponse:
        self._check_epoch(request.engine_epoch)
        _check_acquisition(request.acquisition_id)
        answer = _valid(await self._link.call(lambda call_id: KVRenew(call_id, request.acquisition_id)))
        return kv_transfer_pb2.RenewResponse(ttl=_duration(answer.ttl_seconds))

    async def Release(self, request: kv_transfer_pb2.ReleaseRequest, context: Any) -> kv_transfer_pb2.ReleaseResponse:
        self._check_epoch(request.engine_epoch)
        _check_acquisition(request.acquisition_id)
        answer = await self._link.call(
            lambda call_id: KVRelease(call_id, request.acquisition_id, list(request.generations))
        )
        return kv_transfer_pb2.ReleaseResponse(
            valid=answer.valid and not answer.failure,
            reason=answer.failure,
            checksums=answer.checksums,
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise _error(
                "owner_lost", "engine_epoch belongs to an earlier incarnation of this engine, whose leases have ended"
            )


def _check_acquire(request: kv_transfer_pb2.AcquireRequest) -> None:
    if len(request.lease_id) != LEASE_ID_BYTES:
        raise InvalidArgument(f"lease_id has {len(request.lease_id)} bytes, expected {LEASE_ID_BYTES}", "lease_id")
    if len(request.prompt_digest) != DIGEST_BYTES:
        raise InvalidArgument(
            f"prompt_digest has {len(request.prompt_digest)} bytes, expected {DIGEST_BYTES}", "prompt_digest"
        )
    if not 1 <= len(request.transports) <= _MAX_TRANSPORTS:
        raise InvalidArgument(f"transports must have 1 to {_MAX_TRANSPORTS} entries", "transports")
    if any(len(name) > _MAX_NAME_CHARS for name in (request.kv_layout, *request.transports)):
        raise InvalidArgument(
            f"kv_layout and transports must have at most {_MAX_NAME_CHARS} characters each", "kv_layout"
        )
    # Only the reader's scheduler knows, at the moment of admission, which blocks its prefix cache has.
    if request.skip_tokens:
        raise Unimplemented("skip_tokens must be 0; readers choose the blocks that they copy", field="skip_tokens")


def _check_acquisition(acquisition_id: bytes) -> None:
    if not 1 <= len(acquisition_id) <= _MAX_ACQUISITION_ID_BYTES:
        raise InvalidArgument("acquisition_id must be one that Acquire returned", "acquisition_id")


def _valid(answer: KVAnswer) -> KVAnswer:
    if answer.failure:
        raise _error(answer.failure, answer.detail)
    return answer


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _error(reason: str, detail: str) -> errors.TokenloomError:
    """Return the error for a caller; ``reason`` is one of ``LEASE_ENDS``."""
    kind = errors.NotFound if reason in _NOT_FOUND else errors.FailedPrecondition
    error = kind(detail or reason.replace("_", " "))
    error.reason = reason.upper()
    return error


def serve_kv(
    network: Network, listen: str, servicer: KVTransferServicer, tls: MeshTLS | None, *, insecure: bool
) -> Port:
    """Return a port where other engines reach ``servicer``. Raises ``InvalidArgument`` for an address that other
    machines can reach without TLS, ``Unavailable`` for one that cannot be bound."""
    edge = Edge(check_caller if tls is not None else None)
    edge.add_servicer(kv_transfer_pb2_grpc.add_KVTransferServicer_to_server, servicer)
    return network.port(edge, listen, _LIMITS, tls, insecure=insecure, field="kv_listen")


class KVMoves:
    """Hands attempts that run here over to other engines. The output processor of each says where it goes on; until
    the attempt has ended as PREFILLED it is this engine's."""

    def __init__(self, core: CoreLink, random: Random) -> None:
        """``random`` draws the ids of leases."""
        self._core = core
        self._random = random
        self._tasks = Tasks(lambda error: log.error("a request could not be moved", exc_info=error))
        self._moving: dict[asyncio.Task[str], Attempt] = {}
        self._relief: asyncio.Task[None] | None = None
        self._is_leaving = False

    async def move(self, request_id: str, target: str, why: MoveReason) -> list[tuple[Attempt, str]]:
        """Move the attempts at a request, or all if it is empty, to an engine, or to any if it is empty. Returns them,
        when each has ended or stays, with why it stays; empty for one that has ended. If it is cancelled, they move on
        all the same. Raises ``FailedPrecondition`` if all of them leave because the engine ends."""
        if self._is_leaving:
            raise FailedPrecondition("the engine drains, and all of its requests leave it")
        moves = {self._begin(attempt, target, why): attempt for attempt in self._core.movable(request_id)}
        causes: Sequence[str] = await asyncio.gather(*map(asyncio.shield, moves))
        return list(zip(moves.values(), causes, strict=True))

    def relieve(self, relief: coordinator_pb2.Relief) -> None:
        """Move some of the attempts that run to an engine that has less to do, unless an earlier call still does."""
        if not self._is_leaving and (self._relief is None or self._relief.done()):
            self._relief = self._tasks.spawn(self._relieve(relief), name="relief")

    async def _relieve(self, relief: coordinator_pb2.Relief) -> None:
        chosen = relief.count, relief.free_tokens, relief.before_preemption
        try:
            keys = await self._core.call("requests_to_lend", *chosen)
        except TokenloomError as error:  # the core is dead, or that of another server
            log.info("no request leaves this engine for %s: %s", relief.target, error.message)
            return
        except Exception:  # the engine serves on with the requests that it has
            log.exception("no request leaves this engine for %s because of a bug", relief.target)
            return
        attempts = {attempt.key: attempt for attempt in self._core.movable("")}
        why: MoveReason = "preemption" if relief.before_preemption else "rebalance"
        leaving = [attempts[key] for key in keys if key in attempts] if isinstance(keys, list) else []
        if not self._is_leaving:
            await asyncio.gather(*(self._begin(attempt, relief.target, why) for attempt in leaving))

    async def leave(self, error: TokenloomError) -> None:
        """Move all attempts, because the engine ends, and return when none of them is left, nor of those that move
        already. One that cannot move ends with ``error``, as one at which the output processor replays it elsewhere."""
        self._is_leaving = True  # a move that another one begins would take the end of an attempt from this one
        moves = {**self._moving, **{self._begin(attempt, "", "drain"): attempt for attempt in self._core.movable("")}}
        await asyncio.gather(*(self._leave(attempt, move, error) for move, attempt in moves.items()))

    async def close(self) -> None:
        """Wait for no move any more. Idempotent."""
        await self._tasks.close()

    async def _leave(self, attempt: Attempt, move: "asyncio.Task[str]", error: TokenloomError) -> None:
        ended = asyncio.Event()
        cause = await asyncio.shield(move)
        if attempt.finish_reason is not None:
            return
        if cause != ENDS_SOON:
            self._core.fail(attempt, error)
            return
        attempt.kv.on_settled = ended.set
        await ended.wait()

    def _begin(self, attempt: Attempt, target: str, why: MoveReason) -> "asyncio.Task[str]":
        """Move an attempt in a task of its own: what the core answers is to be noted, also if the caller
        does not wait for it any more."""
        settled, lease_id = asyncio.Event(), self._random.randbytes(LEASE_ID_BYTES)
        attempt.kv.on_settled = settled.set
        # Before anything is awaited: another move would take it for one of its own. And before the core knows: its
        # answer and the request's end may be read in the same turn.
        attempt.kv.move(lease_id, target)
        move = self._tasks.spawn(self._move(attempt, lease_id, settled, why), name=f"move {attempt.request_id}")
        self._moving[move] = attempt
        move.add_done_callback(self._moving.pop)
        return move

    async def _move(self, attempt: Attempt, lease_id: bytes, settled: asyncio.Event, why: MoveReason) -> str:
        if attempt.finish_reason is not None:  # since it was found
            return ""
        try:
            cause = await self._core.call("lend_request", attempt.key, lease_id, attempt.tokens.num_given)
        except TokenloomError as error:
            cause = error.message
        except Exception:
            log.exception("a request could not be lent because of a bug")
            cause = "the engine could not ask its core"
        if cause:
            if attempt.finish_reason is None:
                attempt.kv.stay()
            return str(cause)
        await settled.wait()
        return self._settled(attempt, why)

    def _settled(self, attempt: Attempt, why: MoveReason) -> str:
        """Count an attempt that was lent if it has left. Returns why it stays; empty: it has ended."""
        if attempt.finish_reason is FinishReason.PREFILLED:
            self._core.metrics.kv.observe_move(why)
        return "" if attempt.finish_reason is not None else "no other engine took it, or its blocks were needed"


def counted(moves: Sequence[tuple[Attempt, str]]) -> engine_pb2.MoveRequestsResponse:
    """Return how many attempts of :meth:`KVMoves.move` have left, and why others stay."""
    ends = [attempt.finish_reason for attempt, _ in moves]
    moved, stayed = ends.count(FinishReason.PREFILLED), ends.count(None)
    reasons = sorted({cause for attempt, cause in moves if cause and attempt.finish_reason is None})
    return engine_pb2.MoveRequestsResponse(
        moved=moved, ended=len(ends) - moved - stayed, stayed=stayed, reasons=reasons
    )


CLOSE_SECONDS = 0.25


class KVFront:
    """Owns the KV port, the loads from other engines, and the link to the core's KV thread.

    Attributes:
        owner: This engine as an owner of leased KV; None if it has no KV port.
        address: Where other engines reach the KV port; empty without one.
        lease_seconds: How long a lease lasts that no engine acquires.
        loads: The loads from other engines.
        moves: Hands running attempts over to other engines.
    """

    def __init__(
        self,
        settings: EngineSettings,
        core: CoreLink,
        load: LoadTracker,
        host: Host,
        coordinator: grpc.aio.Channel | None,
        fingerprint: types_pb2.Fingerprint,
    ) -> None:
        """Bind the KV port. ``coordinator``: a channel to it, if there is one. ``fingerprint``: what the engine serves,
        which changes with its weights. Raises as :func:`serve_kv`."""
        self._core = core
        self._load = load
        self._link = KVLink(core.client)
        self._registry = EngineRegistry(coordinator)
        self._server: Port | None = None
        self.owner: coordinator_pb2.EngineRef | None = None
        self.address = ""
        if settings.kv_listen:
            servicer = KVTransferServicer(self._link, host.epoch, fingerprint)
            self._server = serve_kv(host.network, settings.kv_listen, servicer, host.tls, insecure=settings.insecure)
            self.address = settings.kv_advertise_address or self._server.address
            self.owner = coordinator_pb2.EngineRef(engine_id=settings.instance_id, epoch=host.epoch)
        self.lease_seconds = settings.engine.kv.lease_seconds
        reader = ReaderConfig(
            host=socket.gethostname(),
            kv_layout=core.ready.kv_layout,
            block_size=core.ready.block_size,
            num_kv_groups=core.ready.num_kv_groups,
            has_states=core.ready.num_state_slots > 0,
            transports=expanded(settings.kv_transports, on_host=core.ready.pool_is_on_host),
            must_load=settings.engine.kv.policy == "fail",
            fingerprint=fingerprint,
            incarnation=(settings.instance_id, host.epoch),
        )
        self.loads = KVLoads(reader, core, self._link, self._registry, host.channels, host.fall_backs)
        self.moves = KVMoves(core, host.random)

    async def run(self) -> None:
        """Serve the port until the core dies."""
        if self._server is not None:
            await self._server.start()
        await first_of(self._link.run(self.loads.on_verify), self._registry.run(), self.loads.run())

    async def leases_ended(self) -> None:
        """Wait until no KV is held, or about to be held, for other engines."""
        await self._load.until(lambda: not self._core.num_prefill_legs and not self._load.stats.num_leases)

    async def close(self) -> None:
        """End the loads and close the port. Idempotent."""
        await self.moves.close()
        await self.loads.close()
        if self._server is not None:
            await self._server.close(CLOSE_SECONDS)
