"""Places the legs of requests (the prefill, the decode, or all of one): asks the coordinator for an engine, or the last
snapshot while the coordinator is away."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors, wire_errors
from tokenloom.request.packed_ids import num_ids
from tokenloom.request.prefix_schedule import SESSION_HASHES
from tokenloom.services.runtime.peers.hello import is_foreign
from tokenloom.services.runtime.peers.members import ReplicaIndex
from tokenloom.services.runtime.peers.retry_budget import Cause, RetryBudget, RetryDebt
from tokenloom.services.runtime.registry.registry_view import RegistryView, watch_registry
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1.coordinator_pb2 import EngineRef, PickRequest, PickResponse, Subset
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .engine_link import EngineAttempt, EngineLeft, EngineLink, EngineLinks
from .engine_search import EngineSearch
from .last_snapshot import EngineKey, LastSnapshot
from .pick_stream import ANSWER_SECONDS, PickStream

_MAX_PICKS = 3  # engines that do not answer before a request waits
LEFT_OUT_SECONDS = 2.0
"""Long enough for a full engine to finish a few requests, short enough for one that was only cut off."""
MAX_LEFT_OUT = 1024
"""Engines remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class PendingPick:
    """Holds a pick that the coordinator was asked for."""

    request: PickRequest
    response: Awaitable[PickResponse]


FirstPick: TypeAlias = PendingPick | EngineAttempt | None
"""What is known of a request's first engine before the request is made: the pick that was asked for, an attempt on the
only engine, or nothing."""


class Placer:
    """Places legs of requests on engines that answer.

    Attributes:
        budget: Limits the retries of all requests.
    """

    def __init__(
        self,
        coordinator: grpc.aio.Channel,
        fingerprint: Fingerprint,
        links: EngineLinks,
        *,
        instance_id: str,
        subset_size: int,
        seed: int = 0,
        fall_backs: FallBacks | None = None,
    ) -> None:
        """Args:
        coordinator: A channel to the coordinator; :meth:`close` closes it and ``links``.
        instance_id: Names this process among the output processors of the mesh.
        subset_size: Engines of each role that this process works with, of a large mesh.
        seed: Differs between processes; for placement without the coordinator.
        fall_backs: Where it is noted that the coordinator does not answer; None: nowhere.
        """
        self._channel = coordinator
        self._stub = CoordinatorStub(coordinator)
        self._picks = PickStream(self._stub, fall_backs)
        self._fingerprint = fingerprint
        clock = asyncio.get_running_loop().time
        self.budget = RetryBudget(clock)
        self._links = links
        self._snapshot = LastSnapshot(fingerprint, clock, seed)
        self._cooldown = EngineCooldown(clock)
        self._replica_index = ReplicaIndex("output_processor", instance_id)
        self._subset_size = subset_size
        self._subset: Subset | None = None  # None until the position is known
        self._is_closed = False
        self._engine_came = asyncio.Event()  # set once when another engine serves, and replaced

    async def run(self) -> None:
        """Stay in touch with the coordinator until cancelled."""
        await first_of(self._watch(), self._picks.run(), self._replica_index.run(self._stub, self._moved))

    def _moved(self) -> None:
        if (position := self._replica_index.position) is not None:
            self._subset = Subset(index=position.index, count=position.count, size=self._subset_size)

    async def _watch(self) -> None:
        """Follow the coordinator's snapshots. The last one stays in use while the coordinator is away."""
        await watch_registry(self._stub, self._take)

    def _take(self, view: RegistryView) -> None:
        if self._snapshot.update(view):
            engine_came, self._engine_came = self._engine_came, asyncio.Event()
            engine_came.set()
        if self._links.num_wrong and view.complete:
            self._links.forget_gone(view)

    def at_once(self, submit: Submit) -> EngineAttempt | None:
        """Place the beginning of a request on the only engine of the mesh, without the coordinator: any pick would
        choose it. The attempt is not sent yet, and nothing counts it but the engine's own reports.

        Returns None when only :meth:`place` can place it: there are more engines or roles, no stream to the engine is
        open, or the request needs the coordinator's answer for another reason.
        """
        # A pick that can have one answer only still costs a message to the coordinator, its answer and a task that
        # waits for it: 0.6 ms to the first token. Without it the coordinator takes 1.3 instead of 3.0 µs of CPU per
        # token (batch of 64).
        only = self._snapshot.only_engine
        if (
            only is None
            or self._is_closed
            or any(journal.token_ids or journal.emitted_text_bytes for journal in submit.journals)
            or submit.trace_headers
            or submit.prompt.adapter
            or submit.HasField("pooling_params")
            or submit.HasField("data_parallel_rank")
            or submit.session
            or submit.keep_seconds
            or len(submit.block_hash_prefixes) >= SESSION_HASHES
        ):
            return None  # the coordinator does more for it than to choose an engine, or may refuse it
        link = self._links.find_open(only)
        # The engine's KV cache must hold the prompt and the first token.
        num_tokens = len(submit.prompt.token_ids) or num_ids(submit.prompt)
        is_fit = link is not None and num_tokens < link.longest_request
        if link is None or any(each.numerics not in ("", link.serves.numerics) for each in submit.journals):
            return None
        return EngineAttempt(link) if is_fit else None

    def pool_of(self, weights: bytes, numerics: str) -> Fingerprint:
        """Return what engines with these weights and numerics serve, as :meth:`place` takes it. Empty: any."""
        pool = Fingerprint(weights=weights, numerics=numerics)
        pool.MergeFrom(self._fingerprint)
        return pool

    def pool_of_engine(self, key: EngineKey) -> Fingerprint | None:
        """Return what an engine serves, as :meth:`place` takes it; None: the last snapshot does not have it."""
        return self._snapshot.serves(key)

    def ask(self, submit: Submit) -> PendingPick | None:
        """Ask for the first engine of a request that :meth:`at_once` does not place, so that the request can be made
        while the coordinator answers.

        Returns None when only :meth:`place` can ask: the request continues from tokens or is traced, or the coordinator
        is away.
        """
        if submit.journals or submit.trace_headers or not self._picks.is_open:
            return None
        request = _pick_request(submit, EngineRole.ENGINE_ROLE_PREFILL, 0, self._fingerprint, self._subset)
        return PendingPick(request, self._picks.pick(request))

    async def place(
        self,
        submit: Submit,
        leg: EngineRole,
        search: EngineSearch,
        *,
        num_output_tokens: int = 0,
        pool: Fingerprint | None = None,
        pending: PendingPick | None = None,
    ) -> EngineAttempt:
        """Place one leg, ``PREFILL`` for the beginning of a request. The attempt is not sent yet. Without an engine,
        wait for one.

        Args:
            search: The engines that failed this sample, and how long it may wait.
            num_output_tokens: Output tokens so far; the engine has to compute their KV too.
            pool: What the engine of an earlier leg serves, when this leg continues from there.
            pending: What :meth:`ask` returned for this very leg.

        Raises ``ResourceExhausted`` when every engine is full, unless the sample was admitted before; ``Unavailable``
        when no engine took the leg in time, ``EngineKiller`` when none may, ``WeightsReplaced`` when no engine has the
        weights of ``pool`` any more, ``TryElsewhere`` when this process stops.
        """
        request, response = (pending.request, pending.response) if pending else (None, None)
        if request is None:
            request = _pick_request(submit, leg, num_output_tokens, pool or self._fingerprint, self._subset)
        if leg == EngineRole.ENGINE_ROLE_DECODE:
            search.is_admitted = True  # with the leg before
        if search.exclude:
            self._cooldown.add(search.exclude[-1])  # the one that has just failed or refused this sample
        if search.must_wait:
            await search.pause(self._engine_came)
        await search.wait_for_budget(self._engine_came)
        while True:
            if self._is_closed:
                raise errors.TryElsewhere("The output processor has stopped; retry.")
            engine_came = self._engine_came
            try:
                return await self._place_now(request, submit, search.exclude, response)
            except errors.WeightsReplaced:
                raise  # no engine will have them again
            except (errors.Unavailable, errors.ResourceExhausted) as error:
                cause = error
            response = None
            is_full = isinstance(cause, errors.ResourceExhausted) and not search.is_admitted
            if is_full and search.overload is None:
                raise cause
            began_at_theirs = pool is not None and is_foreign(pool.numerics)
            search.next_round(others_served=self._snapshot.had_own, began_at_theirs=began_at_theirs)
            await search.pause(engine_came, cause)

    async def _place_now(
        self,
        request: PickRequest,
        submit: Submit,
        exclude: Collection[EngineKey],
        response: Awaitable[PickResponse] | None,
    ) -> EngineAttempt:
        """Place a leg without waiting. ``response``: the first pick, if it was asked for already."""
        unreached = list(exclude)
        debt = RetryDebt(self.budget)
        left: PickResponse | None = None
        for _ in range(_MAX_PICKS):
            try:
                picked = await self._picked(request, unreached, response or self._ask(request, unreached, submit))
            except (errors.Unavailable, errors.ResourceExhausted):
                # Better than no engine: its frames are checked, and a request that it does not bring further ends.
                if left is None:
                    raise
                picked = left
            response = None
            key = EngineKey(picked.engine.engine_id, picked.engine.epoch)
            pick = picked.pick if picked.HasField("pick") else None
            try:
                link = await self._links.get(picked.engine, even_left=picked is left)
            except BaseException as error:
                if pick is None:
                    self._snapshot.release(key)
                if not isinstance(error, errors.Unavailable):
                    raise
                if picked is left:
                    break
                unreached.append(key)
                self._cooldown.add(key)
                if isinstance(error, EngineLeft):
                    left = picked
                    continue
                debt.failed(Cause.SILENT)
                if not debt.pay():
                    break
                continue
            if request.fingerprint.weights not in (b"", link.serves.weights):
                # It has loaded others since it was picked: one answer would come from two versions of the weights.
                if pick is None:
                    self._snapshot.release(key)
                unreached.append(key)
                continue
            session = picked.session if picked.HasField("session") else None
            return EngineAttempt(link, pick, picked.whole_request, is_counted=pick is None, session=session)
        raise errors.Unavailable("No engine answers; retry.")

    async def place_move(
        self, submit: Submit, source: EngineKey, target: str, *, num_output_tokens: int, pool: Fingerprint | None
    ) -> EngineAttempt:
        """Find an engine at which a running request goes on, without waiting for one. The attempt is not sent yet.

        Args:
            source: Where it runs now.
            target: The only engine that is wanted; empty: any.

        Raises ``Unavailable`` and ``ResourceExhausted``; the other arguments and errors are those of :meth:`place`.
        """
        role = EngineRole.ENGINE_ROLE_DECODE
        request = _pick_request(submit, role, num_output_tokens, pool or self._fingerprint, self._subset)
        if not target:
            return await self._place_now(request, submit, [source], None)
        if target == source.engine_id:
            raise errors.Unavailable(f"The request runs on engine {target} already.")
        picked = self._snapshot.named(request, target)
        try:
            link = await self._links.get(picked.engine)
        except BaseException:
            self._snapshot.release(EngineKey(picked.engine.engine_id, picked.engine.epoch))
            raise
        return EngineAttempt(link, is_counted=True)

    async def place_quiet(
        self, submit: Submit, pool: Fingerprint, exclude: Collection[EngineKey], only: EngineKey | None = None
    ) -> EngineAttempt | None:
        """Find an engine with time to spare that computes exactly as ``pool`` says, without the coordinator: what runs
        there is no request of a client. The attempt is not sent yet. None: there is none now.

        ``only``: the one engine that may be it.
        """
        request = _pick_request(submit, EngineRole.ENGINE_ROLE_PREFILL, 0, pool, None)
        if (identity := self._snapshot.quiet(request, exclude, only)) is None:
            return None
        try:
            link = await self._links.get(identity)
        except errors.Unavailable:
            return None
        serves = link.serves
        return EngineAttempt(link) if (serves.weights, serves.numerics) == (pool.weights, pool.numerics) else None

    def is_crowded(self, key: EngineKey) -> bool:
        """Return whether requests wait on an engine, as far as the last snapshot knows."""
        return self._snapshot.is_crowded(key)

    async def quarantine(self, key: EngineKey, reason: str) -> bool:
        """Let an incarnation of an engine end, because it computes wrong tokens. Returns False if its options do not
        let it end. One that has left, or cannot be reached, has ended or gets no requests."""
        if (identity := self._snapshot.identity(key)) is None:
            return True
        try:
            link = await self._links.get(identity)
        except errors.Unavailable:
            return True
        if link.can_be_quarantined:
            link.quarantine(reason)
        return link.can_be_quarantined

    def check(self, link: EngineLink, found: Callable[[bool], None]) -> None:
        """Find out whether the engine of a link that has ended still runs; :meth:`EngineLinks.check`."""
        self._links.check(link, found)

    def is_open(self, key: EngineKey) -> bool:
        """Return whether there is an open link to an engine."""
        return self._links.find_open(key) is not None

    def is_shared(self, key: EngineKey, num_samples: int) -> bool:
        """Return whether an engine last reported more live requests than the samples of one."""
        return self._snapshot.num_requests(key) > num_samples

    def release(self, attempt: EngineAttempt) -> None:
        """Note that an attempt ended or is not needed. A second call has no effect."""
        if attempt.is_counted:
            attempt.is_counted = False
            self._snapshot.release(attempt.link.key)

    def share(self, attempt: EngineAttempt) -> EngineAttempt:
        """Return an attempt at one more sample on the same engine; its pick is acknowledged with the first."""
        if attempt.is_counted:
            self._snapshot.count(attempt.link.key)
        return EngineAttempt(attempt.link, is_counted=attempt.is_counted)

    async def close(self) -> None:
        """Close the links and the channel, and end the placements. :meth:`run` must be cancelled before."""
        self._is_closed = True
        self._engine_came.set()
        await self._links.close()
        await self._channel.close()

    def _ask(self, request: PickRequest, exclude: Collection[EngineKey], submit: Submit) -> Awaitable[PickResponse]:
        """Ask over the stream of picks, or by a call of its own if the request is traced or the stream is not open.

        A coordinator that is away is not asked: the error comes at once.
        """
        if self._picks.is_away:
            return _away()
        del request.exclude[:]
        request.exclude.extend(EngineRef(engine_id=key.engine_id, epoch=key.epoch) for key in exclude)
        if submit.trace_headers or not self._picks.is_open:
            metadata = tuple(submit.trace_headers.items())
            return self._stub.Pick(request, timeout=ANSWER_SECONDS, metadata=metadata)
        return self._picks.pick(request)

    async def _picked(
        self, request: PickRequest, exclude: Collection[EngineKey], response: Awaitable[PickResponse]
    ) -> PickResponse:
        """Return the coordinator's answer or, while the coordinator is away, the last snapshot's, which has no pick."""
        try:
            return await response
        except grpc.aio.AioRpcError as failure:
            error = wire_errors.from_rpc(failure)
            if isinstance(error, errors.DeadlineExceeded):
                self._picks.suspend()
            elif not isinstance(error, errors.Unavailable) or isinstance(error, errors.WeightsReplaced):
                raise error from None
        except errors.WeightsReplaced:
            raise
        except (errors.Unavailable, errors.DeadlineExceeded):
            pass
        avoided = self._cooldown.now().union(exclude)
        try:
            return self._snapshot.pick(request, avoided)
        except errors.Unavailable:
            if len(avoided) == len(exclude):
                raise
            return self._snapshot.pick(request, exclude)  # an engine that was full a moment ago is better than none


class EngineCooldown:
    """Holds the engines that requests should avoid for a while. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[EngineKey, float] = OrderedDict()  # in the order of expiry

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: EngineKey) -> None:
        """Leave out an engine for :data:`LEFT_OUT_SECONDS` from now on."""
        self._until[key] = self._clock() + LEFT_OUT_SECONDS
        self._until.move_to_end(key)
        while len(self._until) > MAX_LEFT_OUT:
            self._until.popitem(last=False)

    def now(self) -> frozenset[EngineKey]:
        """Return the engines to avoid now, and forget the others."""
        if not self._until:
            return frozenset()
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return frozenset(self._until)


async def _away() -> PickResponse:
    raise errors.Unavailable("The coordinator became unavailable; retry.")


def _pick_request(
    submit: Submit, leg: EngineRole, num_output_tokens: int, pool: Fingerprint, subset: Subset | None
) -> PickRequest:
    pools = submit.HasField("pooling_params")
    return PickRequest(
        fingerprint=pool,
        role=leg,
        prompt_tokens=(len(submit.prompt.token_ids) or num_ids(submit.prompt)) + num_output_tokens,
        max_new_tokens=submit.sampling_params.max_tokens,
        block_hash_prefixes=submit.block_hash_prefixes,
        tenant=submit.tenant,
        priority=submit.priority,
        timeout=submit.timeout if submit.HasField("timeout") else None,
        adapter=submit.prompt.adapter,
        pools=pools,
        query_id=submit.pooling_params.late_interaction.query_id if pools else "",
        subset=subset,
        data_parallel_rank=submit.data_parallel_rank if submit.HasField("data_parallel_rank") else None,
        session=submit.session,
        keep_seconds=submit.keep_seconds,
        preferred_engine=submit.preferred_engine,
    )
