"""The front's side of the engine core: requests in, and each step's outputs to the streams they belong to."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import NoReturn

from tokenloom.engine_core.client.async_core_client import AsyncClient
from tokenloom.engine_core.errors import EngineDeadError, UtilityError
from tokenloom.engine_core.wire.messages import AcceptTokens, CoreReady, EngineCoreOutputs
from tokenloom.request.errors import FailedPrecondition, TokenloomError, Unavailable
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import Tracer

from ..control.kv_event_feed import KVEventFeed
from ..engine_metrics import EngineMetrics
from ..load import LoadTracker
from ..streams.attempt import Attempt
from ..streams.attempt_telemetry import log_events, trace_attempt
from ..streams.attempts import Attempts

log = logging.getLogger(__name__)

_FAILED = "the engine failed; another may take the request"


class CoreLink:
    """Joins the streams of all peers to one core that has started.

    Attributes:
        client: Of the core.
        ready: What the core reported of itself.
        metrics: Those of the engine.
        kv_events: Where the events of the prefix cache go; None: nowhere.
    """

    def __init__(
        self,
        client: AsyncClient,
        ready: CoreReady,
        load: LoadTracker,
        metrics: EngineMetrics,
        *,
        kv_events: KVEventFeed | None = None,
        logs_events: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """``logs_events``: whether the scheduler's events of requests are logged."""
        self.client = client
        self.ready = ready
        self.metrics = metrics
        self.kv_events = kv_events
        self._logs_events = logs_events
        self._tracer = tracer
        self._load = load
        self._live: dict[str, tuple[Attempt, Attempts]] = {}
        self._aborts: list[str] = []  # keys to abort in the core: each was live, so as many as there may be
        self._aborts_waiting = asyncio.Event()

    @property
    def num_prefill_legs(self) -> int:
        """Live attempts that will leave KV held for others."""
        return sum(1 for attempt, _ in self._live.values() if attempt.kv.lease_id)

    async def run(self) -> NoReturn:
        """Distributes outputs until the core is dead: then raises ``EngineDeadError``."""
        while True:
            outputs = await self.client.get_output()
            self._distribute(outputs)
            await asyncio.sleep(0)  # the frames go now, before the next output is asked for
            self.metrics.observe_step(outputs)
            if outputs.kv_events and self.kv_events is not None:
                self.kv_events.publish(outputs.kv_events)

    async def run_aborts(self) -> NoReturn:
        """Sends aborts, those of one moment in one message: who ends attempts need not wait."""
        while True:
            await self._aborts_waiting.wait()
            self._aborts_waiting.clear()
            keys, self._aborts = self._aborts, []
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to free
                await self.client.abort_requests(keys)

    async def call(self, method: str, *args: object) -> object:
        """Calls a utility of the core. Raises ``FailedPrecondition`` with the core's words, ``Unavailable`` when it is
        dead."""
        try:
            return await self.client.call_utility(method, *args)
        except UtilityError as error:
            raise FailedPrecondition(str(error)) from None
        except EngineDeadError:
            raise Unavailable("the engine failed") from None

    def open(self, attempt: Attempt, attempts: Attempts) -> None:
        """Takes a live attempt's outputs to its stream's ``attempts`` from now on."""
        self._live[attempt.key] = attempt, attempts
        self._load.accepted()

    async def hand_over(self, attempt: Attempt) -> None:
        """Gives the core the request of an open attempt, unless that ended meanwhile. Raises ``Unavailable`` when the
        core is dead."""
        request, attempt.request = attempt.request, None
        if request is None:
            return
        try:
            await self.client.add_request(request)
        except EngineDeadError:
            raise Unavailable(_FAILED) from None
        self._load.handed_over(attempt.tokens.prompt)

    async def accept(self, accept: AcceptTokens) -> None:
        """Gives a request of the core its first tokens. Raises ``Unavailable`` when the core is dead."""
        try:
            await self.client.accept_tokens(accept)
        except EngineDeadError:
            raise Unavailable(_FAILED) from None

    def fail(self, attempt: Attempt, error: TokenloomError) -> None:
        """Ends an attempt that cannot go on, if it is still live."""
        _, attempts = self._live.get(attempt.key, (None, None))
        if attempts is not None and attempts.fail(attempt.slot, error) is not None:
            self.end([attempt])
            attempts.notify()

    def drop_leases(self, keys: Iterable[str]) -> None:
        """Nobody will read what finished prefills hold."""
        self._aborts += keys
        if self._aborts:
            self._aborts_waiting.set()

    def end(self, attempts: Iterable[Attempt]) -> None:
        """Forgets attempts that the front ended, and has the core free what they hold."""
        for attempt in attempts:
            if self._live.pop(attempt.key, None) is not None:
                self._ended(attempt, time.monotonic())
                self._aborts.append(attempt.key)
        if self._aborts:
            self._aborts_waiting.set()

    def _distribute(self, outputs: EngineCoreOutputs) -> None:
        """One step's outputs, to every stream at once, so that each makes one frame of it."""
        self._load.observe(outputs)
        changed: set[Attempts] = set()
        now = time.monotonic()
        for output in outputs.outputs:
            entry = self._live.get(output.request_id)
            if entry is None:
                continue  # ended by the front meanwhile
            attempt, attempts = entry
            if self._logs_events:
                log_events(attempt, output.events)
            self.metrics.observe_output(attempt, output, now)
            attempts.take_output(attempt, output)
            changed.add(attempts)
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._ended(attempt, now)
        for attempts in changed:
            attempts.notify()

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
