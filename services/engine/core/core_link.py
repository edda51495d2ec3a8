"""The front's side of the engine core: requests in, and each step's outputs to the streams they belong to."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn, Protocol

from tokenloom.engine_core.client.async_core_client import AsyncClient
from tokenloom.engine_core.errors import EngineDeadError
from tokenloom.engine_core.wire.messages import AcceptTokens, CoreReady, EngineCoreOutputs
from tokenloom.request.errors import TokenloomError, Unavailable
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import Tracer

from ..control.kv_event_feed import KVEventFeed
from ..engine_metrics import EngineMetrics
from ..load import LoadTracker
from ..streams.attempt_trace import trace_attempt
from ..streams.attempts import Attempt
from ..streams.request_events import log_events

log = logging.getLogger(__name__)


class OutputStream(Protocol):
    """Where an attempt's outputs go: the stream it came by."""

    def notify(self) -> None:
        """Something waits in the stream's frame builder."""


class CoreLink:
    """Joins the streams of all peers to one core."""

    def __init__(
        self,
        client: AsyncClient,
        load: LoadTracker,
        metrics: EngineMetrics,
        *,
        kv_events: KVEventFeed | None = None,
        logs_events: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """``kv_events``: where the prefix cache's go; ``logs_events``: whether requests' are logged."""
        self._kv_events = kv_events
        self._logs_events = logs_events
        self._tracer = tracer
        self._client = client
        self._load = load
        self._metrics = metrics
        self._live: dict[str, tuple[Attempt, OutputStream]] = {}
        self._aborts: list[str] = []  # keys to abort in the core: each was live, so as many as there may be
        self._aborts_waiting = asyncio.Event()

    @property
    def client(self) -> AsyncClient:
        return self._client

    @property
    def step(self) -> int:
        """Of the core's loop, as last heard."""
        return self._load.step

    @property
    def is_paused(self) -> bool:
        """Its step may stand still."""
        return self._load.is_paused

    @property
    def num_prefill_legs(self) -> int:
        """Live attempts that will leave KV held for others."""
        return sum(1 for attempt, _ in self._live.values() if attempt.lease_id)

    async def start(self) -> CoreReady:
        """Brings the core up. Raises ``EngineStartError``."""
        ready = await self._client.start()
        self._load.started(ready.num_kv_blocks)
        return ready

    async def run(self) -> NoReturn:
        """Distributes outputs until the core is dead: then raises ``EngineDeadError``."""
        while True:
            outputs = await self._client.get_output()
            self._distribute(outputs)
            await asyncio.sleep(0)  # the frames go now, before the next output is asked for
            self._observe(outputs)

    async def run_aborts(self) -> NoReturn:
        """Sends aborts, those of one moment in one message: who ends attempts need not wait."""
        while True:
            await self._aborts_waiting.wait()
            self._aborts_waiting.clear()
            keys, self._aborts = self._aborts, []
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to free
                await self._client.abort_requests(keys)

    def open(self, attempt: Attempt, stream: OutputStream) -> None:
        """Takes a live attempt's outputs to ``stream`` from now on."""
        self._live[attempt.key] = attempt, stream
        self._load.accepted()

    async def hand_over(self, attempt: Attempt) -> None:
        """Gives the core the request of an open attempt, unless that ended meanwhile. Raises ``Unavailable`` when the
        core is dead."""
        request, attempt.request = attempt.request, None
        if request is None:
            return
        with _reported():
            await self._client.add_request(request)
        self._load.handed_over(attempt.num_prompt_tokens)

    async def accept(self, accept: AcceptTokens) -> None:
        """Gives a request of the core its first tokens. Raises ``Unavailable`` when the core is dead."""
        with _reported():
            await self._client.accept_tokens(accept)

    def fail(self, attempt: Attempt, error: TokenloomError) -> None:
        """Ends an attempt that cannot go on, if it is still live."""
        entry = self._live.get(attempt.key)
        if entry is not None and attempt.attempts.fail(attempt.slot, error) is not None:
            self.end([attempt])
            entry[1].notify()

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
        streams: set[OutputStream] = set()
        now = time.monotonic()
        if self._logs_events:
            self._log_events(outputs)
        for output in outputs.outputs:
            entry = self._live.get(output.request_id)
            if entry is None:
                continue  # ended by the front meanwhile
            attempt, stream = entry
            self._metrics.observe_output(attempt, output, now)
            attempt.attempts.take_output(attempt, output)
            streams.add(stream)
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._ended(attempt, now)
        for stream in streams:
            stream.notify()

    def _observe(self, outputs: EngineCoreOutputs) -> None:
        """The step as a whole, for whom nobody's token waits."""
        self._metrics.observe_step(outputs)
        if outputs.kv_events and self._kv_events is not None:
            self._kv_events.publish(outputs.kv_events)

    def _log_events(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if (entry := self._live.get(output.request_id)) is not None:
                log_events(entry[0], output.events)

    def _ended(self, attempt: Attempt, now: float) -> None:
        self._load.ended()
        self._metrics.observe_end(attempt, now)
        assert attempt.finish_reason is not None
        reason = attempt.finish_reason.name.lower()
        request_log = RequestLog(log, attempt.request_id, attempt.trace_headers)
        request_log.debug("ended: %s, %d tokens", reason, attempt.num_output_tokens)
        if self._tracer is not None and attempt.trace_headers:
            trace_attempt(self._tracer, attempt, attempt.trace_headers, now)
        if attempt.on_end is not None:
            attempt.on_end()


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except EngineDeadError:
        raise Unavailable("the engine failed; another may take the request") from None
