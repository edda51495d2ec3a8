"""Writes the answer of one request as a stream of events, mostly without waking the task of the request."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from ..generation.delivered import Delivered
from ..generation.running_generation import RunningGeneration
from ..http.client_flow import TurnShare
from ..http.http_exchange import HttpExchange
from ..http.response_writer import Headers
from ..mesh.collector import Delta
from ..openai.event_ids import EventId

LOOK_SECONDS = 1.0
"""Between two looks at the streams."""
REPEAT_SECONDS = 10.0
"""A client whose stream has begun gets something to skip after so long a silence, and again after each further one."""


class LiveStream(Protocol):
    """Describes what is looked at."""

    def look(self, head_after: float) -> None:
        """Note whether anything was written since the last look, and write what the client skips if it is time.

        ``head_after``: seconds after which the head of the response is sent.
        """


class SilentStreams:
    """Looks at every live stream once a second.

    The client of a prompt that waited in an engine's queue received nothing for as long as it waited, and proxies and
    SDKs gave up. Nothing is measured for each token: a stream only notes that it has written.
    """

    def __init__(self, head_after: float) -> None:
        """``head_after``: seconds without output after which the head of a response is sent; 0: it waits for output."""
        self._head_after = head_after
        self._streams: set[LiveStream] = set()  # at most those of the gateway's connections
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: LiveStream) -> None:
        """Look at a stream from now on."""
        self._streams.add(stream)
        if self._timer is None and self._head_after:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def remove(self, stream: LiveStream) -> None:
        """Look at it no more."""
        self._streams.discard(stream)

    def _look(self) -> None:
        self._timer = None
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)
        for stream in tuple(self._streams):
            stream.look(self._head_after)


VALUES_PER_SLICE = 4096
"""Log probabilities that one request may shape in one turn of the event loop: a few milliseconds."""


class AnswerShaper(Protocol):
    """Shapes the output of one request."""

    def first_events(self) -> bytes:
        """Return the events before any output."""

    def events(self, delta: Delta) -> bytes:
        """Return the events of some output; empty when there is nothing to send."""

    def last_events(self) -> bytes:
        """Return the events after all output."""

    def keep_alive(self) -> bytes:
        """Return what clients of this API skip: it is sent when there is no output for a while."""

    def repeat(self, delta: Delta) -> None:
        """Shape output that the client of a resumed answer has: what follows depends on it."""

    def is_large(self, delta: Delta) -> bool:
        """Return whether :meth:`shape` should go before :meth:`events`, which would take long otherwise."""

    def shape(self, delta: Delta) -> Iterator[int]:
        """Shape a delta's log probabilities, step by step; yield how many were shaped in each step."""

    def add(self, delta: Delta) -> Iterator[int] | None:
        """Keep some output for :meth:`body`; return the steps of :meth:`shape`, or None without any."""

    def body(self) -> Iterator[bytes]:
        """Return the whole JSON response, in blocks."""


class AnswerStream:
    """Writes an answer. Once its reader waits, output is written when it arrives: its first piece with the head of the
    response. The task of the request wakes for what takes long or has to wait, and for the end."""

    def __init__(
        self,
        exchange: HttpExchange,
        generation: RunningGeneration,
        answer: AnswerShaper,
        turns: TurnShare,
        headers: Callable[[], Headers],
        silent: SilentStreams,
    ) -> None:
        """``turns``: limits the answers that begin and end in one turn of the event loop. ``headers``: makes those of
        the response, when it begins. ``silent``: looks at this stream while it lives."""
        self._exchange = exchange
        self._generation = generation
        self._answer = answer
        self._turns = turns
        self._headers = headers
        self._slices = Slices()
        self._silent = silent
        self._silent_seconds = 0.0
        self._has_first = False  # whether the first events were sent
        self._waits = False  # for output, and meanwhile :meth:`look` may write
        self._has_written = False  # since the last look

    async def run(self, resumed: EventId | None) -> None:
        """Write the answer to its end. ``resumed``: what the client has of it; None: it is new."""
        self._silent.add(self)
        try:
            self._waits = True
            # An error before the head still gets its own status.
            deltas = await self._generation.take(self._write_now if resumed is None else None)
            self._waits = False
            events = b""
            if not self._has_first:
                await self._turns.wait()
                if not self._exchange.started:
                    await self._exchange.start(200, self._headers())
                events, self._has_first = self._answer.first_events(), True
            if resumed is not None:
                events = await self._repeat(Delivered(resumed.positions), deltas, events)
                deltas = []
            await self._write_rest(deltas, events)
        finally:
            self._waits = False
            self._silent.remove(self)

    def look(self, head_after: float) -> None:
        """See :class:`LiveStream`."""
        if self._has_written or not self._waits:
            self._has_written, self._silent_seconds = False, 0.0
            return
        self._silent_seconds += LOOK_SECONDS
        if self._silent_seconds >= (REPEAT_SECONDS if self._exchange.started else head_after):
            self._silent_seconds = 0.0
            if self._turns.take():
                self._keep_alive()
            else:
                self._turns.call(self._keep_alive)

    def _keep_alive(self) -> None:
        exchange = self._exchange
        if not self._waits or self._has_written:
            return  # output has come since
        if exchange.started:
            if exchange.response.is_open:
                exchange.response.write(self._answer.keep_alive())
        elif exchange.can_begin:
            exchange.begin(self._headers(), self._answer.keep_alive())

    async def _repeat(self, delivered: Delivered, deltas: list[Delta], events: bytes) -> bytes:
        """Write the rest of a resumed stream, up to where all that follows is new to the client. Return the events that
        are left to write. ``events``: what comes before ``deltas``."""
        exchange, generation, answer = self._exchange, self._generation, self._answer
        while True:
            for delta in deltas:
                for part, is_new in delivered.cut(delta):
                    if part.logprobs and answer.is_large(part):
                        await self._slices.run(answer.shape(part))
                    if is_new:
                        events += answer.events(part)
                    else:
                        answer.repeat(part)
            if delivered.is_over or generation.done:
                return events
            if events:
                await exchange.write(events)
                events = b""
            deltas = await generation.take()

    async def _write_rest(self, deltas: list[Delta], events: bytes) -> None:
        """Write the body from some deltas on. ``events``: what comes before them."""
        exchange, generation, answer = self._exchange, self._generation, self._answer
        while True:
            for delta in deltas:
                if delta.logprobs and answer.is_large(delta):
                    await self._slices.run(answer.shape(delta))
                events += answer.events(delta)
            if generation.done:
                await self._turns.wait()
                await exchange.finish(events + answer.last_events())
                return
            if events:
                await exchange.write(events)
                events, self._has_written = b"", True
            self._waits = True
            deltas = await generation.take(self._write_now)
            self._waits = False

    def _write_now(self, delta: Delta) -> bool:
        """Write output without waking the task of the request, if that takes no time and the connection has room."""
        exchange, answer = self._exchange, self._answer
        if delta.logprobs and answer.is_large(delta):
            return False
        if not self._has_first:
            return self._begin_now(delta)
        if not exchange.response.is_open:
            return False
        self._generation.count(delta)
        if events := answer.events(delta):
            exchange.response.write(events)
            self._has_written = True
        return True

    def _begin_now(self, delta: Delta) -> bool:
        """Begin the response with its first output, if the answers that begin in this turn leave time for it."""
        # A step may begin hundreds of answers. Those beyond this turn's share are begun by their own tasks, in later
        # turns.
        exchange = self._exchange
        if not (exchange.response.is_open if exchange.started else exchange.can_begin) or not self._turns.take():
            return False
        self._generation.count(delta)
        events = self._answer.first_events() + self._answer.events(delta)
        self._has_first = self._has_written = True
        if exchange.started:
            exchange.response.write(events)
        else:
            exchange.begin(self._headers(), events)
        return True


class Slices:
    """Counts the log probabilities that a request has shaped since the event loop last ran."""

    def __init__(self) -> None:
        self._num_values = 0

    async def run(self, steps: Iterator[int]) -> None:
        """Run the steps, each of which yields how many values it has shaped; let the event loop run in between."""
        for num_values in steps:
            self._num_values += num_values
            if self._num_values >= VALUES_PER_SLICE:
                self._num_values = 0
                await asyncio.sleep(0)
