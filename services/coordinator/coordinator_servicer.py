"""Serves the coordinator's RPCs from the registry. Gives each process of a service that has enrolled its position among
them."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from tokenloom.request.errors import InvalidArgument, NotFound, ResourceExhausted, TokenloomError, Unavailable
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.hello import HELLO_SECONDS, check_hello, make_hello
from tokenloom.services.runtime.peers.subset import ReplicaPosition
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    Drain,
    EngineCommand,
    EngineReport,
    EnrollRequest,
    PickBatch,
    PickRequest,
    PickResponse,
    Position,
    Relief,
    ScaleRequest,
    ScaleResponse,
    SetAdapterRequest,
    SetAdapterResponse,
    SetDesiredStateRequest,
    SetDesiredStateResponse,
    WatchRequest,
)
from tokenloom.v1.types_pb2 import EngineRole

from .cache_followers import CacheFollowers
from .engines.data_parallel_groups import Commands, DataParallelGroups
from .engines.encoders import ENCODE
from .engines.engine_record import check_identity, check_report
from .engines.engine_registry import Registry
from .engines.engine_stream import EngineStream, ReportPace, to_duration
from .engines.rebalancing import Rebalancer, counts_of
from .picks.pick_slices import PickMetrics, PickSlices
from .picks.placed import Placed
from .snapshot_feed import SnapshotFeed

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Reports: TypeAlias = AsyncIterator[EngineReport]

WATCH_SECONDS = 0.1
"""Changes are published this often, if there are any."""
GATHER_SECONDS = 0.5
"""How long a change of positions waits for others: parts of a mesh start, and are replaced, several at a time."""
REJOIN_SECONDS = 1.0
"""How long an operator's call waits for an engine that has left: with new weights an engine joins again."""
REPORTED_SECONDS = 1.5
"""After a change of adapters, until every engine has reported those that a gateway has loaded there."""
_LEGS = {EngineRole.ENGINE_ROLE_PREFILL: "PREFILL", EngineRole.ENGINE_ROLE_DECODE: "DECODE"}


NATIVE_ENGINES = 8
"""Fewer engines do not get so many picks that their time matters: no native code is compiled or loaded for them."""


class EnrolledReplicas:
    """Holds the processes whose ``Enroll`` lasts. A process that calls twice counts once."""

    def __init__(self) -> None:
        self._calls: dict[str, Counter[str]] = {}  # by service, of each process
        self._positions: dict[str, dict[str, ReplicaPosition]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._is_closed = False

    @contextmanager
    def enrolled(self, service: str, name: str) -> Iterator[None]:
        """Count a process while the body runs."""
        calls = self._calls.setdefault(service, Counter())
        # The new stream of a process that reconnects may open before the old one has ended; the count bridges the two.
        calls[name] += 1
        self._announce(service)
        try:
            yield
        finally:
            calls[name] -= 1
            if not calls[name]:
                del calls[name]
                self._announce(service)

    def position(self, service: str, name: str) -> ReplicaPosition:
        """Return the position of a process that is enrolled."""
        if (found := self._positions.get(service)) is None:
            found = self._positions[service] = subset.positions(self._calls[service])
        return found[name]

    def changed(self, service: str) -> asyncio.Event:
        """Return the event that the next change of the service's positions sets."""
        return self._changed.setdefault(service, asyncio.Event())

    def close(self) -> None:
        """Announce no change any more: calls that end because the coordinator stops do not move the others."""
        self._is_closed = True

    def _announce(self, service: str) -> None:
        self._positions.pop(service, None)
        if not self._is_closed and (changed := self._changed.pop(service, None)) is not None:
            changed.set()


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):
    """Serves the RPCs. Methods raise errors, which the edge turns into statuses.

    Attributes:
        has_many: Set once :data:`NATIVE_ENGINES` have been joined at one moment.
        bill: Shares the CPU time of this process out by picks; None without ``--bill``.
    """

    def __init__(
        self,
        registry: Registry,
        name: str,
        epoch: int,
        picks: PickMetrics,
        caches: CacheFollowers | None = None,
        clock: Callable[[], float] = time.monotonic,
        rebalancer: Rebalancer | None = None,
    ) -> None:
        """``caches``: follows the engines' prefix caches; None: the index has only what was picked. ``clock``:
        seconds, by which picks are measured and shared out. ``rebalancer``: decides which requests move; None: none
        do."""
        self._registry = registry
        self._caches = caches
        self._feed = SnapshotFeed(registry)
        self._report_pace = ReportPace()
        self._rebalancer = rebalancer
        self._is_short = False  # whether an engine has reported, since the last look, that it is short of KV blocks
        self._name = name
        self._epoch = epoch
        self._picks = picks
        self._streams: dict[str, EngineStream] = {}  # one for each joined engine
        self._replicas = EnrolledReplicas()
        self._groups = DataParallelGroups()
        self.has_many = asyncio.Event()
        self.bill: CpuBill | None = None
        self._complete = asyncio.Event()
        self._progress = asyncio.Event()  # set, and replaced, when an engine is further with the wanted state
        self._sent_revision = 0  # the one that all engines were sent
        self._adapters_changed = 0, 0.0  # the latest version of the adapters, and when it was seen
        self._closing = False
        self._clock = clock
        self._slices = PickSlices(self._pick, clock)

    async def publish(self) -> None:
        """Refresh the registry, publish its changes and pace the engines, every ``WATCH_SECONDS`` until cancelled."""
        now, late = asyncio.get_running_loop().time, 0.0
        while True:
            # Once in 0.1 s for all, and not at each pick: a pick that also woke every watcher took 114 Python calls.
            self._registry.refresh()
            self._ask_for_adapters()
            self._announce_adapters(now())
            self._announce_claims()
            self._announce_state()
            if self._registry.is_complete:
                self._complete.set()
                if self._rebalancer is not None and (self._is_short or self._rebalancer.is_on):
                    self._rebalance(self._rebalancer, now())
            for _ in self._feed.slices(now()):
                await asyncio.sleep(0)
            self._pace(late, now())
            due = now() + WATCH_SECONDS
            await asyncio.sleep(WATCH_SECONDS)
            late = now() - due

    async def Pick(self, request: PickRequest, context: _Context) -> PickResponse:
        return (await self._slices.answer_one(request)).response()

    async def PickStream(  # type: ignore[override]  # it writes serialized messages to the context
        self, requests: AsyncIterator[PickBatch], context: _Context
    ) -> None:
        # An empty message opens the stream: an output processor that has read it knows that this coordinator has the
        # method, and sends its picks here instead of calling Pick.
        await context.write(b"")
        async for batch in requests:
            began = self._clock()
            async for results in self._slices.answer(batch.pick):
                await context.write(results)
            self._picks.seconds.observe_many(self._clock() - began, len(batch.pick))

    async def Watch(  # type: ignore[override]  # the messages are serialized, once for all watchers
        self, request: WatchRequest, context: _Context
    ) -> AsyncIterator[bytes]:
        log, revision = self._feed.log(request), None
        while True:
            for _ in log.prepared(revision):
                await asyncio.sleep(0)
            for published in log.after(revision):
                revision = published.revision
                yield published.data
            if revision == log.revision:
                await log.changed()

    async def Enroll(self, request: EnrollRequest, context: _Context) -> AsyncIterator[Position]:
        service, name = request.service, request.instance_id
        if not service or not name:
            raise InvalidArgument("service and instance_id must not be empty", "instance_id" if service else "service")
        with self._replicas.enrolled(service, name):
            await self._complete.wait()  # before that, most of the others have not called yet
            sent = None
            while True:
                changed = self._replicas.changed(service)
                if (position := self._replicas.position(service, name)) != sent:
                    sent = position
                    yield Position(index=position.index, count=position.count)
                await changed.wait()
                # Each position that changes moves the subsets of all processes of the service, and with them their
                # connections.
                await asyncio.sleep(GATHER_SECONDS)

    async def Join(  # type: ignore[override]  # it writes to the context, while another task reads
        self, requests: _Reports, context: _Context
    ) -> None:
        first = await _first_report(requests)
        check_hello(first.hello, peer_id=self._name, epoch=self._epoch, expected_peer=first.identity.engine_id)
        check_identity(first)
        if first.role == ENCODE:
            answer = EngineCommand(hello=make_hello(self._name, self._epoch))
            await self._registry.encoders.serve(first, requests, answer, context)
            return
        stream = self._open(first)  # an engine that reads our hello is registered
        answer = EngineCommand(
            hello=make_hello(self._name, self._epoch),
            incarnation=stream.record.incarnation,
            desired=self._first(stream),
        )
        if self._registry.is_complete:
            stream.interval = self._report_pace.interval
            answer.report_interval.CopyFrom(to_duration(stream.interval))
        try:
            # The stream of an engine that is killed ends, and :meth:`_close` removes it at once. Reading and writing
            # end together: an engine whose reports still come, but which gets no commands, would never drain.
            await first_of(self._read(stream, requests), stream.write(answer, context))
        finally:
            self._close(stream)

    async def SetAdapter(self, request: SetAdapterRequest, context: _Context) -> SetAdapterResponse:
        self._registry.set_adapter(request.adapter, unloaded=request.unloaded)
        return SetAdapterResponse()

    async def SetDesiredState(self, request: SetDesiredStateRequest, context: _Context) -> SetDesiredStateResponse:
        ends_at = asyncio.get_running_loop().time() + request.patience.ToNanoseconds() / 1e9
        try:
            async with asyncio.timeout_at(ends_at):
                # What the engines were in is known once all have joined: half of a sleep cannot be ended before.
                await self._complete.wait()
        except TimeoutError:
            raise Unavailable("engines are still joining the coordinator; retry") from None
        self._registry.set_state(request)
        self._announce_state()
        # Not at the next tick only: until then output processors would send requests to engines that are not in it.
        self._registry.refresh()
        self._feed.publish(asyncio.get_running_loop().time())
        names, revision = list(self._streams), self._registry.wanted.revision
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at):
                await self._settled(names, revision)
        return SetDesiredStateResponse(engines=self._registry.progress(names))

    async def _settled(self, names: Sequence[str], revision: int) -> None:
        """Return when every engine has reached the wanted state, or has failed to, or the state is another one."""
        while self._registry.wanted.revision == revision:
            changed, patience = self._progress, None
            if all(each.is_done or each.cause for each in self._registry.progress(names)):
                if self._streams.keys() >= set(names):
                    return
                patience = REJOIN_SECONDS
            try:
                async with asyncio.timeout(patience):
                    await changed.wait()
            except TimeoutError:
                return

    async def Scale(self, request: ScaleRequest, context: _Context) -> ScaleResponse:
        name, size = request.data_parallel_group, request.data_parallel_size
        for engine_id, command in self._groups.resize(name, size):
            self._streams[engine_id].command(command)
        await self._groups.wait_resized(name, size)
        return ScaleResponse()

    def drain(self, engine_id: str, grace: float) -> None:
        """Ask an engine to finish its requests and leave within ``grace`` seconds. Raises ``NotFound`` if unknown."""
        stream = self._streams.get(engine_id) or self._registry.encoders.stream(engine_id)
        if stream is None:
            raise NotFound(f"No engine {engine_id!r} has joined.")
        stream.command(EngineCommand(drain=Drain(grace=to_duration(grace))))

    def _start_waves(self, commands: Commands) -> None:
        for engine_id, command in commands:
            if (stream := self._streams.get(engine_id)) is not None:
                try:
                    stream.command(command)
                except ResourceExhausted:
                    # A start that is not sent must not count as sent: the other ranks of the group wait in their
                    # collective operations.
                    self._groups.not_asked(stream.record.identity)

    def close(self) -> None:
        """Keep the registry as it is. To be called before the streams are cut: output processors place by the last
        snapshot from then on, which must not be empty."""
        self._closing = True
        self._registry.encoders.close()
        self._replicas.close()

    def _pick(self, request: PickRequest) -> Placed:
        if self.bill is not None:
            self.bill.add(request.tenant, 1)
        try:
            placed = self._registry.pick(request)
        except TokenloomError as error:
            self._picks.outcomes.inc(error.reason)
            raise
        self._picks.outcomes.inc("WHOLE" if placed.whole_request else _LEGS[request.role])
        if (turn := placed.session) is not None and turn.past_tokens and request.role != EngineRole.ENGINE_ROLE_DECODE:
            self._picks.turns.inc("store" if turn.from_store else "elsewhere" if turn.moved else "home")
        return placed

    def _open(self, first: EngineReport) -> EngineStream:
        identity = first.identity
        self._registry.check_name(first)
        self._groups.join(identity)
        stream = EngineStream(self._registry.join(identity, first))
        if len(self._registry) >= NATIVE_ENGINES:
            self.has_many.set()
        if (older := self._streams.get(identity.engine_id)) is not None:
            # The newer stream wins: an engine that its supervisor restarted must not wait until the connection of its
            # predecessor has timed out.
            older.overtake(identity.epoch)
        self._streams[identity.engine_id] = stream
        if self._caches is not None:
            self._caches.join(stream.record)
        if (changes := self._registry.adapters.join(stream.record)) is not None:
            stream.command(EngineCommand(adapters=changes))
        self._start_waves(self._groups.report(identity, first))
        log.info("engine %s joined: %s", identity.engine_id, identity.address)
        return stream

    def _close(self, stream: EngineStream) -> None:
        if self._closing:
            return
        self._registry.leave(stream.record)
        self._advance()
        self._groups.leave(stream.record.identity)
        engine_id = stream.record.identity.engine_id
        if self._streams.get(engine_id) is stream:
            del self._streams[engine_id]
            if self._caches is not None:
                self._caches.leave(engine_id)
        log.info("engine %s %s", engine_id, "was overtaken by a newer one" if stream.overtaken else "left")

    def _ask_for_adapters(self) -> None:
        """Ask engines to load the adapters for which requests wait."""
        to_load, self._registry.adapters.to_load = self._registry.adapters.to_load, []
        for engine_id, changes in to_load:
            with contextlib.suppress(ResourceExhausted):  # another engine is asked later
                if (stream := self._streams.get(engine_id)) is not None:
                    stream.command(EngineCommand(adapters=changes))

    def _announce_adapters(self, now: float) -> None:
        """Ask engines for what they lack since the adapters have changed: they joined before a gateway had loaded one
        on all engines that it knew, or before another engine brought one from the former coordinator."""
        adapters = self._registry.adapters
        if not (adapters.changed and self._registry.is_complete):
            return
        if adapters.version != self._adapters_changed[0]:
            self._adapters_changed = adapters.version, now
        if now - self._adapters_changed[1] < REPORTED_SECONDS:
            return
        for stream in self._streams.values():
            if (changes := adapters.lacking(stream.record, adapters.changed)) is not None:
                try:
                    stream.command(EngineCommand(adapters=changes))
                except ResourceExhausted:
                    return  # the next time
        adapters.changed.clear()

    def _announce_claims(self) -> None:
        """Send engines whether they wait aside, where that has changed."""
        unannounced = self._registry.claims.unannounced
        for engine_id, reason in list(unannounced.items()):
            if (stream := self._streams.get(engine_id)) is not None:
                try:
                    stream.command(EngineCommand(waits_aside=reason))
                except ResourceExhausted:
                    continue  # the next time
            del unannounced[engine_id]

    def _rebalance(self, rebalancer: Rebalancer, now: float) -> None:
        """Let engines that have much more to do than others give requests to them."""
        self._is_short = False
        engines = [counts_of(stream.record) for stream in self._streams.values()]
        for order in rebalancer.orders(engines, now):
            relief = Relief(
                target=order.target,
                count=order.count,
                before_preemption=order.before_preemption,
                free_tokens=order.free_tokens,
            )
            with contextlib.suppress(ResourceExhausted):  # the next time
                self._streams[order.source].command(EngineCommand(relief=relief))

    def _first(self, stream: EngineStream) -> DesiredState | None:
        """Return the state for the answer to a join; None: the engine waits for it."""
        if (state := self._registry.desired(stream.record)) is not None:
            stream.sent_revision = state.revision
        else:
            self._sent_revision = 0
        return state

    def _announce_state(self) -> None:
        """Send engines the state that is wanted, where they do not know it."""
        revision = self._registry.wanted.revision
        if self._sent_revision == revision:
            return
        are_all_sent = True
        for stream in self._streams.values():
            if stream.sent_revision == revision or not stream.record.follows:
                continue
            if (state := self._registry.desired(stream.record)) is None:
                are_all_sent = False
                continue
            try:
                stream.want(state)
            except ResourceExhausted:
                are_all_sent = False  # the next time
        if are_all_sent:
            self._sent_revision = revision
        self._advance()

    def _advance(self) -> None:
        """Let operators' calls see how far the engines are."""
        self._progress.set()
        self._progress = asyncio.Event()

    def _pace(self, late: float, now: float) -> None:
        """Ask the engines to report as often as suits their number. Those that re-join a new coordinator keep their
        interval until it knows how many they are."""
        if not self._registry.is_complete:
            return
        interval = self._report_pace.follow(len(self._streams), late, now)
        if self._caches is not None and self._registry.uses_prefixes:
            self._caches.follow(interval)
        for stream in self._streams.values():
            if stream.interval != interval:
                with contextlib.suppress(ResourceExhausted):  # the next time
                    stream.pace(interval)

    async def _read(self, stream: EngineStream, requests: _Reports) -> None:
        async for report in requests:
            check_report(report)
            if report.role == ENCODE:
                raise InvalidArgument("an engine does not become an encoder", "role")
            if report.role == EngineRole.ENGINE_ROLE_PREFILL and not stream.record.identity.kv_address:
                raise InvalidArgument("an engine that serves no KV to others does not become a prefill engine", "role")
            is_further = report.progress != stream.record.report.progress
            self._registry.report(stream.record, report)
            self._is_short |= report.short_of_blocks
            if is_further:
                self._advance()
            if stream.record.identity.data_parallel_group and not stream.overtaken:
                self._start_waves(self._groups.report(stream.record.identity, report))


def add_to_server(servicer: CoordinatorServicer, server: Any) -> None:
    """Add the servicer as the generated function does, but pass on what is serialized already as it is."""
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, _WithoutSerializer(server))  # type: ignore[arg-type]


class _WithoutSerializer:
    """Stands for a server to generated code."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        watch, picks = handlers["Watch"], handlers["PickStream"]
        bare: dict[str, Any] = {
            # Without a serializer gRPC sends bytes as they are. A whole view of 1,000 engines has 290 KB; serialized
            # for each of nine watchers ten times a second, it filled a core.
            "Watch": grpc.unary_stream_rpc_method_handler(watch.unary_stream, watch.request_deserializer),
            "PickStream": grpc.stream_stream_rpc_method_handler(picks.stream_stream, picks.request_deserializer),
        }
        self._server.add_registered_method_handlers(service, {**handlers, **bare})

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Do nothing: the handlers were added by name."""


async def _first_report(requests: _Reports) -> EngineReport:
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidArgument("The first report must contain hello and identity.", "hello") from None
