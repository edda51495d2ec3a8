"""Passes requests to the engine core, and the outputs of each step to the streams that they belong to."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from tokenloom.engine_core.client.async_core_client import AsyncCoreClient
from tokenloom.engine_core.data.errors import EngineDeadError, NotSentError, UtilityError
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.messages import AcceptTokens, EngineCoreOutput, EngineCoreOutputs
from tokenloom.request.errors import FailedPrecondition, Internal, TokenloomError, TryElsewhere, Unavailable
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import Tracer

from ..records.attempt import Attempt, log_events, trace_attempt
from ..records.engine_metrics import EngineMetrics
from ..records.kv_event_feed import KVEventFeed
from ..records.load import LoadTracker
from .row_loads import RowLoads

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

log = logging.getLogger(__name__)

FEWEST_OTHERS = 16
"""With fewer outputs of others behind them, first tokens have no frame of their own: it costs each service as much as
so many outputs."""

CORE_DIED = "The engine failed; retry the request."


class StreamAttempts(Protocol):
    """Holds the attempts of one stream, which take what the core produced for them.

    Attributes:
        is_amid_step: Whether only the first tokens of a step were passed to it so far: what else it has to send waits
            for those that follow.
    """

    is_amid_step: bool

    def take_output(self, attempt: Attempt, output: EngineCoreOutput) -> None:
        """Add what a step produced for a live attempt to the stream's next frame."""

    def fail(self, slot: int, error: TokenloomError) -> Attempt | None:
        """End the attempt in a slot with ``error``, and return it; None if the slot is not live."""

    @property
    def notify(self) -> Callable[[], None]:
        """To be called when the stream has something to send."""

    @property
    def may_move(self) -> bool:
        """Whether its attempts may go on at other engines while they run."""


class CoreLink:
    """Connects the streams of all peers to one core that has started.

    Attributes:
        client: The client of the core.
        ready: What the core reported when it had started.
        metrics: The engine's metrics.
        kv_events: Receives the events of the prefix cache; None if they are not published.
        clock: Returns the seconds by which the times of attempts are measured.
        rows: Loads the rows that the core asks for; None if the model reads text only.
        bill: Shares the CPU time of the front out to attempts; None without ``--bill``.
        core_cpu_ns: CPU time of the core's processes by tenant, as the core has last said it; empty without ``--bill``.
    """

    def __init__(
        self,
        client: AsyncCoreClient,
        ready: CoreReady,
        load: LoadTracker,
        metrics: EngineMetrics,
        *,
        kv_events: KVEventFeed | None = None,
        logs_events: bool = False,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``logs_events``: whether the scheduler's events are logged for each request. ``clock``: returns the
        seconds by which the times of attempts are measured."""
        self.client = client
        self.ready = ready
        self.metrics = metrics
        self.kv_events = kv_events
        self._logs_events = logs_events
        self._tracer = tracer
        self.clock = clock
        self.rows: RowLoads | None = None
        self.bill: CpuBill | None = None
        self.core_cpu_ns: Mapping[str, int] = {}
        self._load = load
        self._live: dict[str, tuple[Attempt, StreamAttempts]] = {}
        self._aborts: list[str] = []  # keys to abort in the core; bounded by the live requests
        self._aborts_waiting = asyncio.Event()

    @property
    def num_prefill_legs(self) -> int:
        """The number of live attempts whose KV will be held for other engines."""
        return sum(1 for attempt, _ in self._live.values() if attempt.kv.lease_id)

    @property
    def num_requests(self) -> int:
        """The number of live requests; the samples of one request count as one."""
        return len({attempt.request_id for attempt, _ in self._live.values()})

    async def run(self) -> NoReturn:
        """Distribute outputs until the core dies. Raises ``EngineDeadError``."""
        while True:
            outputs = await self.client.get_output()
            await self._distribute(outputs)
            # Asking the core for the next output before the frames were written delayed each token by up to 0.1 ms.
            await asyncio.sleep(0)  # lets the streams write their frames first
            self.metrics.observe_step(outputs)
            if outputs.cpu_ns:
                self.core_cpu_ns = outputs.cpu_ns
            if outputs.kv_events and self.kv_events is not None:
                self.kv_events.publish(outputs.kv_events)

    async def run_aborts(self) -> NoReturn:
        """Send aborts to the core, several in one message, so that ending an attempt never waits."""
        while True:
            await self._aborts_waiting.wait()
            self._aborts_waiting.clear()
            keys, self._aborts = self._aborts, []
            try:
                await self.client.abort_requests(keys)
            except EngineDeadError:
                pass  # a dead core holds nothing
            except NotSentError as error:
                log.error("requests are not aborted in the core: %s", error)

    async def call(self, method: str, *args: object) -> object:
        """Call a utility of the core. Raises ``FailedPrecondition``, or ``Unavailable`` if the core is dead."""
        try:
            return await self.client.call_utility(method, *args)
        except (NotSentError, UtilityError) as error:
            raise FailedPrecondition(str(error)) from None
        except EngineDeadError:
            raise Unavailable("the engine failed") from None

    def open(self, attempt: Attempt, attempts: StreamAttempts) -> None:
        """Pass the outputs of an attempt to its stream's ``attempts`` from now on."""
        self._live[attempt.key] = attempt, attempts
        self._load.accepted()

    async def hand_over(self, attempt: Attempt) -> None:
        """Send the request of an attempt that has not ended. Raises ``TryElsewhere`` if the core is dead, ``Internal``
        for a request that no message can carry."""
        request, attempt.request = attempt.request, None
        if request is None:
            return
        if attempt.trace_headers and self._tracer is not None:
            request.is_traced = True
        try:
            await self.client.add_request(request)
        except EngineDeadError:
            raise TryElsewhere(CORE_DIED) from None
        except NotSentError as error:
            log.error("request %s cannot be passed to the engine core: %s", attempt.request_id, error)
            raise Internal("the request cannot be passed to the engine core") from None
        self._load.handed_over(attempt.tokens.prompt)

    async def accept(self, accept: AcceptTokens) -> None:
        """Send the tokens of the prefill leg to the core. Raises as :meth:`hand_over`."""
        try:
            await self.client.accept_tokens(accept)
        except EngineDeadError:
            raise TryElsewhere(CORE_DIED) from None
        except NotSentError as error:
            log.error("tokens cannot be passed to the engine core: %s", error)
            raise Internal("the request's tokens cannot be passed to the engine core") from None

    def movable(self, request_id: str) -> list[Attempt]:
        """Return the live attempts at a request, or at all if it is empty, that may go on at other engines: those that
        the core has, and that are not handed over yet."""
        return [
            attempt
            for attempt, attempts in self._live.values()
            if attempts.may_move
            and (attempt.request_id == request_id or attempt.request_id.startswith(request_id and f"{request_id}-"))
            and not (attempt.kv.lease_id or attempt.kv.awaits_tokens or attempt.pooling_task or attempt.request)
        ]

    async def keep(self, attempt: Attempt) -> None:
        """Let an attempt that moves go on here, unless it has left. A dead core ends it anyway."""
        try:
            await self.call("keep_request", attempt.key)
        except TokenloomError as error:
            log.debug("request %s is not kept: %s", attempt.request_id, error.message)

    def fail(self, attempt: Attempt, error: TokenloomError) -> None:
        """Fail an attempt, if it is still live."""
        _, attempts = self._live.get(attempt.key, (None, None))
        if attempts is not None and attempts.fail(attempt.slot, error) is not None:
            self.end([attempt])
            attempts.notify()

    def drop_leases(self, keys: Iterable[str]) -> None:
        """Release the KV that finished prefills hold."""
        self._aborts += keys
        if self._aborts:
            self._aborts_waiting.set()

    def end(self, attempts: Iterable[Attempt]) -> None:
        """Forget attempts that the front has ended, and abort them in the core."""
        for attempt in attempts:
            if self._live.pop(attempt.key, None) is not None:
                self._ended(attempt, self.clock())
                # Ending an attempt happens in callbacks and in `finally` blocks, where nothing may be awaited.
                self._aborts.append(attempt.key)
        if self._aborts:
            self._aborts_waiting.set()

    async def _distribute(self, outputs: EngineCoreOutputs) -> None:
        """Distribute the outputs of a step, then notify each stream once, so that it builds one frame. The streams of
        requests that begin are notified before, so that first tokens are sent before others are distributed."""
        self._load.observe(outputs)
        now, rows = self.clock(), outputs.outputs
        if outputs.step_spans:
            for key, steps in outputs.step_spans.items():
                if (entry := self._live.get(key)) is not None:
                    entry[0].steps = steps
        changed: dict[StreamAttempts, None] = {}  # in the order of their first output
        if (
            len(rows) > FEWEST_OTHERS
            and rows[0].prefill_stats is not None
            and rows[-FEWEST_OTHERS].prefill_stats is None
        ):
            num_begun = next(index for index, row in enumerate(rows) if row.prefill_stats is None)
            changed = self._take(rows[:num_begun], now)
            try:
                for attempts in changed:
                    attempts.is_amid_step = True
                    attempts.notify()
                await asyncio.sleep(0)  # they write these frames
            finally:
                for attempts in changed:
                    attempts.is_amid_step = False
            rows = rows[num_begun:]
        changed |= self._take(rows, now)
        for attempts in changed:
            attempts.notify()
        if outputs.rows_wanted and self.rows is not None:
            for wanted in outputs.rows_wanted:
                if (entry := self._live.get(wanted.request_id)) is not None:
                    self.rows.begin(entry[0], wanted)

    def _take(self, outputs: Sequence[EngineCoreOutput], now: float) -> dict[StreamAttempts, None]:
        """Pass outputs to the streams of their attempts; return these."""
        changed: dict[StreamAttempts, None] = {}
        for output in outputs:
            entry = self._live.get(output.request_id)
            if entry is None:
                continue  # the front has ended it
            attempt, attempts = entry
            if self._logs_events:
                log_events(attempt, output.events)
            self.metrics.observe_output(attempt, output, now)
            attempts.take_output(attempt, output)
            changed[attempts] = None
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._ended(attempt, now)
        return changed

    def _ended(self, attempt: Attempt, now: float) -> None:
        self._load.ended()
        self.metrics.observe_end(attempt, now)
        assert attempt.finish_reason is not None
        reason = attempt.finish_reason.name.lower()
        request_log = RequestLog(log, attempt.request_id, attempt.trace_headers)
        request_log.debug("ended: %s, %d tokens", reason, attempt.tokens.output)
        if self._tracer is not None and attempt.trace_headers:
            trace_attempt(self._tracer, attempt, attempt.trace_headers, now)
        attempt.ended()
