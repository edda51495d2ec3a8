"""Where a leg of a request goes: the coordinator's pick, or the last snapshot's while the coordinator is away."""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.services.runtime.telemetry.tracing import Headers
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, PickRequest, PickResponse, WatchRequest
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

from .engine_link import EngineLink, EngineLinks
from .last_snapshot import EngineKey, LastSnapshot
from .pick_stream import PickStream

log = logging.getLogger(__name__)

_PICK_SECONDS = 1.0  # a coordinator that takes longer is as good as away
_MAX_PICKS = 3  # engines that do not answer before a request is given up
_REWATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Placement:
    """An engine with an open stream."""

    link: EngineLink
    pick: PickId | None
    """To be acknowledged by the engine; None when the coordinator was away."""
    whole_request: bool = True
    """Not only the leg that was asked for."""
    is_counted: bool = False
    """In the last snapshot, until it is released."""

    @property
    def key(self) -> EngineKey:
        """Which engine."""
        return EngineKey.of(self.link.identity)


@dataclass(frozen=True, slots=True)
class Asked:
    """A pick that is on its way."""

    request: PickRequest
    response: asyncio.Future[PickResponse]


class Placer:
    """Places legs of requests on engines that answer."""

    def __init__(self, coordinator: grpc.aio.Channel, fingerprint: Fingerprint, links: EngineLinks) -> None:
        """``coordinator``: a channel to it, closed by :meth:`close`."""
        self._channel = coordinator
        self._stub = CoordinatorStub(self._channel)
        self._picks = PickStream(self._stub)
        self._fingerprint = fingerprint
        self._links = links
        self._snapshot = LastSnapshot(fingerprint)
        self._known = asyncio.Event()

    @property
    def limits(self) -> ModelLimits | None:
        """What the engines can take; None before the first of them was heard of."""
        return self._snapshot.limits

    async def wait_limits(self, seconds: float) -> None:
        """Returns when the limits are known, or after ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._known.wait()

    async def run(self) -> None:
        """Stays in touch with the coordinator, for ever."""
        await first_of(self._watch(), self._picks.run())

    async def _watch(self) -> None:
        """Follows the coordinator's snapshots, for ever: while it is away the last one stands."""
        while True:
            call = self._stub.Watch(WatchRequest())
            try:
                async for snapshot in call:
                    self._snapshot.update(snapshot)
                    if self._snapshot.limits is not None:
                        self._known.set()
            except grpc.aio.AioRpcError as error:
                log.debug("coordinator: %s %s", error.code().name, error.details())
            finally:
                call.cancel()
            await asyncio.sleep(_REWATCH_SECONDS)

    def ask(self, submit: Submit) -> Asked | None:
        """Asks for the first engine of a request before that is begun: making it takes no time of its own then. None
        when that has to wait for :meth:`place`: it goes on from tokens or is traced, or nobody answers."""
        if submit.accepted_token_ids or submit.trace_headers or not self._picks.is_open:
            return None
        request = _pick_request(submit, EngineRole.ENGINE_ROLE_PREFILL, 0, self._fingerprint)
        return Asked(request, self._picks.pick(request))

    async def place(
        self,
        submit: Submit,
        leg: EngineRole,
        *,
        num_output_tokens: int = 0,
        pool: Fingerprint | None = None,
        exclude: Collection[EngineKey] = (),
        asked: Asked | None = None,
    ) -> Placement:
        """Places one leg, ``PREFILL`` for the beginning of a request.

        Args:
            num_output_tokens: Output tokens that there are already; the engine has to compute their KV too.
            pool: What the engine of an earlier leg serves, when this one has to go on from there.
            exclude: Engines that failed this request.
            asked: What :meth:`ask` gave for this very leg.

        Raises ``ResourceExhausted`` when every engine is full, ``Unavailable`` when none can be reached.
        """
        if asked is not None:
            request = asked.request
        else:
            request = _pick_request(submit, leg, num_output_tokens, pool or self._fingerprint)
        unreached = list(exclude)
        for _ in range(_MAX_PICKS):
            engine, pick, whole = await self._pick(request, unreached, submit.trace_headers, asked)
            asked = None
            try:
                return Placement(await self._links.get(engine), pick, whole, is_counted=pick is None)
            except errors.Unavailable:
                key = EngineKey.of(engine)
                if pick is None:
                    self._snapshot.release(key)
                unreached.append(key)
        raise errors.Unavailable("no engine answers; try again")

    def release(self, placement: Placement) -> None:
        """The placed leg ended."""
        if placement.is_counted:
            self._snapshot.release(placement.key)

    def share(self, placement: Placement) -> Placement:
        """The same engine for all of one more sample; its pick is acknowledged with the first, its end is its own."""
        if placement.is_counted:
            self._snapshot.count(placement.key)
        return replace(placement, pick=None, whole_request=True)

    async def close(self) -> None:
        """Closes the channel; cancel :meth:`run` before."""
        await self._channel.close()

    async def _pick(
        self, request: PickRequest, exclude: Collection[EngineKey], trace_headers: Headers, asked: Asked | None
    ) -> tuple[EngineIdentity, PickId | None, bool]:
        try:
            if asked is not None:
                response = await _answer(asked.response)
            else:
                del request.exclude[:]
                request.exclude.extend(EngineRef(engine_id=key.engine_id, epoch=key.epoch) for key in exclude)
                response = await self._response(request, tuple(trace_headers.items()))
        except errors.TokenloomError as error:
            if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            identity, whole = self._snapshot.pick(
                request.role, request.prompt_tokens, pool=request.fingerprint, exclude=exclude
            )
            return identity, None, whole
        return response.engine, response.pick, response.whole_request

    async def _response(self, request: PickRequest, metadata: tuple[tuple[str, str], ...]) -> PickResponse:
        """By a call of its own where a trace goes with it, or before the stream is open."""
        if metadata or not self._picks.is_open:
            try:
                return await self._stub.Pick(request, timeout=_PICK_SECONDS, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise errors.from_rpc(error) from None
        return await _answer(self._picks.pick(request))


async def _answer(response: asyncio.Future[PickResponse]) -> PickResponse:
    try:
        async with asyncio.timeout(_PICK_SECONDS):
            return await response
    except TimeoutError:
        raise errors.DeadlineExceeded("the coordinator does not answer") from None


def _pick_request(submit: Submit, leg: EngineRole, num_output_tokens: int, pool: Fingerprint) -> PickRequest:
    return PickRequest(
        fingerprint=pool,
        role=leg,
        prompt_tokens=len(submit.prompt.token_ids) + num_output_tokens,
        max_new_tokens=submit.sampling_params.max_tokens,
        block_hash_prefixes=submit.block_hash_prefixes,
        tenant=submit.tenant,
        priority=submit.priority,
        timeout=submit.timeout if submit.HasField("timeout") else None,
    )
