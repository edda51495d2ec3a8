"""Answers picks in slices, so that however many come at one moment, the engines' reports are read in between. Counts
picks and the time that they are here."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from prometheus_client import CollectorRegistry

from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram, LabelledCounter
from tokenloom.v1.coordinator_pb2 import PickRequest

from .placed import Placed, error_part

SLICE_SECONDS = 0.005
"""Picks of all streams together take no longer in one turn of the event loop, except for the last one of a slice."""
SINGLE_SECONDS = SLICE_SECONDS / 2
"""As long as picks without a stream take together."""


_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000)


class PickMetrics:
    """Holds the metrics of one coordinator's picks.

    Attributes:
        outcomes: Counts them by outcome.
        turns: Counts turns of sessions, without their decode legs, by where the KV of the turn before is.
        seconds: Of the picks of streams.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.outcomes = LabelledCounter(
            registry,
            "tokenloom_picks",
            "Picks: WHOLE, PREFILL, DECODE or an error's reason. Most requests of a mesh with one engine need none.",
            "outcome",
            ("WHOLE", "PREFILL", "DECODE"),
        )
        self.turns = LabelledCounter(
            registry,
            "tokenloom_session_turns",
            "Placed turns of sessions that had one before, by where its KV is: home, on the engine that was picked; "
            "store, in a store (--kv-store) from which that engine loads it; elsewhere, on another engine.",
            "kv",
            ("home", "store", "elsewhere"),
        )
        self.seconds = Histogram(
            registry,
            "tokenloom_pick_seconds",
            "Time from reading a message with picks until the last of its answers was sent.",
            {},
            [bound / 1000 for bound in _MILLISECONDS],
        )


class PickSlices:
    """Shares the turns of the event loop between the streams of picks, in the order in which they ask, and gives a
    share of each turn to picks that come one by one.

    Args:
        pick: Places one leg. Raises ``TokenloomError``.
        clock: Seconds, of any beginning.
    """

    def __init__(self, pick: Callable[[PickRequest], Placed], clock: Callable[[], float] = time.perf_counter) -> None:
        self._pick = pick
        self._clock = clock
        self._ends_at: float | None = None  # the slice of this turn of the event loop; None: no pick was made in it
        self._waiting: deque[asyncio.Future[None]] = deque()  # one for each stream at most
        self._singles_end_at: float | None = None
        # One for each call at most, of which the server has a limited number.
        self._singles: deque[tuple[PickRequest, asyncio.Future[Placed]]] = deque()

    async def answer(self, requests: Sequence[PickRequest]) -> AsyncIterator[bytes]:
        """Yield the answers to one batch in its order, as a serialized ``PickResults`` for each slice; at least one."""
        num_done = 0
        while True:
            ends_at = await self._begin()
            parts: list[bytes] = []
            while num_done < len(requests):
                try:
                    parts.append(self._pick(requests[num_done]).part())
                except Exception as error:  # of one request, not of the stream
                    parts.append(error_part(of_exception(error)))
                num_done += 1
                if self._clock() >= ends_at:
                    break
            # Parts that are joined make a message. Copying the engine into it and serializing it again took 28.6 µs a
            # pick instead of 26.7, and with 256 hashes 100 instead of 93.
            yield b"".join(parts)
            if num_done == len(requests):
                return
            await asyncio.sleep(0)  # streams that have not begun are before this one

    async def answer_one(self, request: PickRequest) -> Placed:
        """Return the outcome of a pick that comes without a batch. Raises what ``pick`` raises."""
        if not self._singles and self._has_time_for_one():
            return self._pick(request)
        answer: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._singles.append((request, answer))
        return await answer

    def _answer_singles(self) -> None:
        """Answer those that wait, as far as the time of this turn of the event loop suffices."""
        self._singles_end_at = None
        while self._singles and self._has_time_for_one():
            request, answer = self._singles.popleft()
            if answer.done():  # its call was cancelled
                continue
            try:
                answer.set_result(self._pick(request))
            except Exception as error:  # of any kind: the call waits for it
                answer.set_exception(error)

    def _has_time_for_one(self) -> bool:
        if self._singles_end_at is None:
            self._singles_end_at = self._clock() + SINGLE_SECONDS
            asyncio.get_running_loop().call_soon(self._answer_singles)
            return True
        return self._clock() < self._singles_end_at

    async def _begin(self) -> float:
        """Wait until picks may be made, and return until when."""
        if self._waiting or (self._ends_at is not None and self._clock() >= self._ends_at):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                # Its turn was given before the cancellation came, and must be passed on, or no stream would ever pick
                # again.
                if not waiter.cancelled():  # it was this stream's turn
                    self._end_turn()
                raise
        if self._ends_at is None:
            self._ends_at = self._clock() + SLICE_SECONDS
            asyncio.get_running_loop().call_soon(self._end_turn)
        return self._ends_at

    def _end_turn(self) -> None:
        """Let the next stream begin, after what else is ready in this turn of the event loop."""
        self._ends_at = None
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # otherwise its stream was cancelled
                waiter.set_result(None)
                return
