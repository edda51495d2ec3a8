"""Brings the core the rows of images that it asks for, from the encoders that have the files."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc.aio
import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenloom.engine_core.client.async_core_client import AsyncCoreClient
from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.engine_core.data.errors import EngineDeadError, NotSentError
from tokenloom.engine_core.data.messages import ArrivedRows, RowsWanted, SchedulerStats
from tokenloom.request.errors import (
    Code,
    Internal,
    InvalidArgument,
    MediaLost,
    ResourceExhausted,
    TokenloomError,
    Unavailable,
)
from tokenloom.request.wire_errors import from_rpc, of_exception
from tokenloom.services.runtime.liveness import QUIET_SECONDS, answered
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import Counter as FastCounter
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1 import encoder_pb2, encoder_pb2_grpc
from tokenloom.v1.types_pb2 import MediaItem

from ..records.attempt import Attempt

log = logging.getLogger(__name__)

CONCURRENT: Final = 32
"""So many images are read at once; each takes the memory of a piece. The core bounds the bytes that it asks for."""
_MAX_CHANNELS: Final = 32
"""Channels to encoders that stay open without calls."""
_RETRIES: Final = 3
"""How often in a row a call that brought nothing is repeated at once; an encoder that is restarted has lost its files
anyway."""
_FULL_SECONDS: Final = 30.0
"""How long an encoder may have no room before the request ends."""
_MOST_WAIT_SECONDS: Final = 5.0
"""An encoder that names a longer time is asked after this one."""
_AWAY = (Code.UNAVAILABLE, Code.CANCELLED)


@dataclass(frozen=True)
class Pauses:
    """Says how long to wait, in seconds, before a call is repeated."""

    away: float = 0.1
    """For the first time after an encoder did not answer; twice as long for each further one."""
    full: float = 1.0
    """If an encoder has no room and names no time."""
    quiet: float = QUIET_SECONDS
    """Until an encoder that has sent nothing is asked whether it is there: a tower may take minutes."""


_FAILURES = ("MEDIA_LOST", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "INTERNAL")
"""Reasons that are shown from the start: a rate needs a first value."""


class RowMetrics:
    """Observes the rows of images that the core asks for. The core's counters are read when metrics are scraped."""

    def __init__(
        self, registry: CollectorRegistry, labels: Mapping[str, str], read: Callable[[], SchedulerStats]
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the core's latest statistics."""
        names = list(labels)
        for name, text, value in (
            ("items_asked", "Images and sounds asked for; again after a preemption.", lambda: read().rows_items_asked),
            (
                "items_received",
                "Images and sounds whose rows came and were needed.",
                lambda: read().rows_items_received,
            ),
            (
                "bytes_received",
                "Bytes of rows of images and sounds that came, as float32.",
                lambda: read().rows_bytes_received,
            ),
        ):
            FastCounter(registry, f"tokenloom_rows_{name}", text, dict(labels), value)
        text = "Bytes of rows that are computed soon or on their way from encoders."
        held = Gauge("tokenloom_rows_bytes", text, names, registry=registry)
        held.labels(*labels.values()).set_function(lambda: read().rows_bytes)
        text = "Requests that wait for rows of images and sounds."
        waiting = Gauge("tokenloom_rows_requests_waiting", text, names, registry=registry)
        waiting.labels(*labels.values()).set_function(lambda: read().num_waiting_for_rows)
        text = "Seconds from asking an encoder for an image or a sound until the core has its rows."
        seconds = process_metrics.REQUEST_SECONDS
        self._seconds = Histogram(registry, "tokenloom_rows_load_seconds", text, dict(labels), seconds)
        text = "Images and sounds whose rows could not be loaded, by the error's reason."
        self._failures = Counter("tokenloom_rows_failures", text, [*names, "reason"], registry=registry)
        self._values = list(labels.values())
        for reason in _FAILURES:
            self._failures.labels(*self._values, reason)

    def loaded(self, seconds: float) -> None:
        """Note that the core has all rows of an image."""
        self._seconds.observe(seconds)

    def failed(self, reason: str) -> None:
        """Note that rows could not be loaded. ``reason``: that of the error."""
        self._failures.labels(*self._values, reason if reason in _FAILURES else "INTERNAL").inc()


class EncoderChannels:
    """Opens channels to encoders on first use, and closes those that were not used for longest."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._open: OrderedDict[str, tuple[grpc.aio.Channel, list[int]]] = OrderedDict()  # with the number of users

    @asynccontextmanager
    async def stub(self, address: str) -> AsyncIterator["encoder_pb2_grpc.EncoderAsyncStub"]:
        """Provide a stub for the encoder at an address."""
        if address not in self._open:
            self._open[address] = self._channels.open(address, "encoder"), [0]
        channel, users = self._open[address]
        self._open.move_to_end(address)
        users[0] += 1
        try:
            yield encoder_pb2_grpc.EncoderStub(channel)
        finally:
            users[0] -= 1
            await self._close_unused()

    async def close(self) -> None:
        """Close all channels."""
        while self._open:
            _, (channel, _) = self._open.popitem()
            await channel.close()

    async def _close_unused(self) -> None:
        while len(self._open) > _MAX_CHANNELS:
            # Sought anew after each wait: meanwhile a call may have begun.
            unused = next((address for address, (_, users) in self._open.items() if not users[0]), None)
            if unused is None:
                return
            channel, _ = self._open.pop(unused)
            await channel.close()


class RowsReceiver(Protocol):
    """Takes rows, and ends attempts whose rows do not come."""

    @property
    def client(self) -> AsyncCoreClient: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    def fail(self, attempt: Attempt, error: TokenloomError) -> None:
        """Fail an attempt, if it is still live."""


@dataclass(slots=True, eq=False)
class _Load:
    """Reads the rows of one image for all attempts that wait for it."""

    wanted: RowsWanted
    task: "asyncio.Task[None] | None" = None
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """By their names in the core."""
    num_sent: int = 0
    """Rows that the core has."""

    def item_of(self, attempt: Attempt) -> MediaItem:
        """Return the item as an attempt names it, with the encoder that has its file."""
        assert attempt.media is not None
        return attempt.media.items[self.wanted.key]

    @property
    def request(self) -> encoder_pb2.GetRequest:
        """The call that brings the rest, in the name of the attempt that waits longest."""
        first = next(iter(self.attempts.values()))
        media = first.media
        assert media is not None
        return encoder_pb2.GetRequest(
            item=self.item_of(first),
            tenant=media.tenant,
            cache_salt=media.cache_salt,
            first_row=self.num_sent,
        )


class RowLoads:
    """Reads each image once, however many attempts wait for it, and until none does any more."""

    def __init__(
        self,
        receiver: RowsReceiver,
        channels: Channels,
        row_numbers: int,
        metrics: RowMetrics,
        pause: Pauses = Pauses(),
    ) -> None:
        """``row_numbers``: of a row of one level, the model's hidden size."""
        self._receiver = receiver
        self._encoders = EncoderChannels(channels)
        self._row_numbers = row_numbers
        self._metrics = metrics
        self._pause = pause
        self._loads: dict[int, _Load] = {}  # by number; bounded by the bytes that the core may ask for
        self._room = asyncio.Semaphore(CONCURRENT)
        self._tasks = Tasks(lambda error: log.error("rows could not be loaded", exc_info=error))

    def begin(self, attempt: Attempt, wanted: RowsWanted) -> None:
        """Read rows that an attempt waits for, unless they are being read."""
        if (media := attempt.media) is None or wanted.key not in media.items:
            self._receiver.fail(attempt, Internal())  # a bug of the core: it asks for what the request does not have
            return
        load = self._loads.get(wanted.number)
        if load is None:
            load = self._loads[wanted.number] = _Load(wanted)
            load.attempts[attempt.key] = attempt
            load.task = self._tasks.spawn(self._run(load), name="engine-rows")
        load.attempts[attempt.key] = attempt
        if media.on_end is None:
            media.on_end = lambda: self._leave(attempt)
        for other in list(self._loads.values()):  # what the core asks for again, it has given up
            if other.wanted.key == wanted.key and other.wanted.number < wanted.number:
                self._remove(other, attempt)

    async def close(self) -> None:
        """End all calls, and close the channels."""
        await self._tasks.close()
        await self._encoders.close()

    def _leave(self, attempt: Attempt) -> None:
        for load in list(self._loads.values()):
            self._remove(load, attempt)

    def _remove(self, load: _Load, attempt: Attempt) -> None:
        """Let a load go on without an attempt; end it if it was the last one."""
        if load.attempts.pop(attempt.key, None) is not None and not load.attempts:
            self._loads.pop(load.wanted.number, None)
            if load.task is not None:
                load.task.cancel()

    async def _run(self, load: _Load) -> None:
        began = self._receiver.clock()
        try:
            async with self._room:
                await self._fetch(load)
            self._metrics.loaded(self._receiver.clock() - began)
        except EngineDeadError:
            pass  # all attempts end with the core
        except Exception as error:  # the edge: a failed load ends its attempts, and nothing else
            self._fail(load, of_exception(error))
        finally:
            # A load that was given up may have a successor: the core asks under the same number for another request.
            if self._loads.get(load.wanted.number) is load:
                del self._loads[load.wanted.number]

    def _fail(self, load: _Load, error: TokenloomError) -> None:
        attempts, load.attempts = load.attempts, {}  # so that their ends do not cancel this task
        self._fail_all(attempts.values(), load.wanted.key, error)

    def _fail_all(self, attempts: Collection[Attempt], key: RowsKey, error: TokenloomError) -> None:
        self._metrics.failed(error.reason)
        log.warning("the rows of a file cannot be loaded for %d requests: %s", len(attempts), error.message)
        for attempt in attempts:
            self._receiver.fail(attempt, _named(error, key, attempt))

    def _lose(self, load: _Load, address: str, why: str) -> None:
        """End the attempts whose file was at an encoder. Raises ``MediaLost`` if no other ones are left."""
        error = MediaLost(why)
        there = {key: attempt for key, attempt in load.attempts.items() if load.item_of(attempt).encoder == address}
        if len(there) == len(load.attempts):
            raise error
        # The gateway of the others has put the file elsewhere: ended with these, they would be restored for nothing,
        # which may happen to a request a few times only.
        load.attempts = {key: attempt for key, attempt in load.attempts.items() if key not in there}
        self._fail_all(there.values(), load.wanted.key, error)

    async def _fetch(self, load: _Load) -> None:
        """Read all rows. A call that ends early is repeated from where it ended. Raises what ends the attempts."""
        num_failed, full_since = 0, None
        while load.num_sent < load.wanted.key.num_rows:
            num_before, request = load.num_sent, load.request
            try:
                await self._call(load, request)
                error: TokenloomError = Unavailable("the encoder ended a call before the last row")
            except grpc.aio.AioRpcError as status:
                error = from_rpc(status)
            if load.num_sent == load.wanted.key.num_rows:
                return
            if load.num_sent > num_before:
                num_failed, full_since = 0, None
            if error.code is Code.RESOURCE_EXHAUSTED:
                full_since = full_since or self._receiver.clock()
                if self._receiver.clock() - full_since > _FULL_SECONDS:
                    raise ResourceExhausted("the encoder has no room for the file; retry the request")
                wait = self._pause.full if error.retry_after is None else error.retry_after
                await asyncio.sleep(min(max(wait, self._pause.away), _MOST_WAIT_SECONDS))
            elif error.code in _AWAY:
                num_failed += 1
                if num_failed > _RETRIES:
                    # Another encoder can take the file, which only the gateway can send there.
                    self._lose(load, request.item.encoder, "the encoder that has the file does not answer")
                    num_failed = 0
                else:
                    await asyncio.sleep(self._pause.away * 2 ** (num_failed - 1))
            elif error.code is Code.NOT_FOUND:
                self._lose(load, request.item.encoder, "the encoder does not have the file any more")
                num_failed = 0
            elif error.code in (Code.INVALID_ARGUMENT, Code.DEADLINE_EXCEEDED):
                raise error  # of this image
            else:
                log.error("an encoder refuses a call: %s", error.message)
                raise Internal("the encoder could not compute the file")

    async def _call(self, load: _Load, request: encoder_pb2.GetRequest) -> None:
        async with self._encoders.stub(request.item.encoder) as stub:
            call = stub.Get(request)

            def ask() -> Awaitable[object]:
                return stub.GetEncoderInfo(encoder_pb2.GetEncoderInfoRequest())

            try:
                while isinstance(chunk := await answered(call.read(), ask, self._pause.quiet), encoder_pb2.RowChunk):
                    # Off the event loop: a piece of 4 MB takes it 3 ms.
                    rows = await asyncio.to_thread(self._checked, load, chunk)
                    await self._send(load, rows)
            except TimeoutError:
                # Repeated here it would take as long again, and the gateway knows the other encoders.
                self._lose(load, request.item.encoder, "the encoder that has the file is silent")
            finally:
                call.cancel()

    async def _send(self, load: _Load, rows: npt.NDArray[np.float32]) -> None:
        message = ArrivedRows(load.wanted.key, load.wanted.number, load.num_sent, rows)
        try:
            await self._receiver.client.send_rows(message)
        except NotSentError as error:
            log.error("rows of a file cannot be passed to the engine core: %s", error)
            raise Internal("the rows of a file cannot be passed to the engine core") from None
        load.num_sent += len(rows)

    def _checked(self, load: _Load, chunk: encoder_pb2.RowChunk) -> npt.NDArray[np.float32]:
        """Return the rows [n, levels * hidden_size] of a chunk. Raises ``Internal`` unless they are the next ones, of
        the right width, and finite: a step that computed others would fail, or make useless KV."""
        key: RowsKey = load.wanted.key
        width = key.levels * self._row_numbers
        if chunk.first_row != load.num_sent or not 1 <= chunk.num_rows <= key.num_rows - load.num_sent:
            raise _wrong(f"rows {chunk.first_row} to {chunk.first_row + chunk.num_rows} after {load.num_sent} of {key}")
        if chunk.width != width:
            raise _wrong(f"{chunk.width} numbers a row, expected {width}")
        rows = _numbers(chunk)
        if rows is None or len(rows) != chunk.num_rows * width:
            raise _wrong(f"{len(chunk.rows)} bytes of type {chunk.type} for {chunk.num_rows} rows of {width} numbers")
        if not np.isfinite(rows).all():
            raise _wrong("NaN or infinities")
        return rows.reshape(chunk.num_rows, width)


def _named(error: TokenloomError, key: RowsKey, attempt: Attempt) -> TokenloomError:
    """Return the error of an image with its place in an attempt's prompt, for which the client has a name."""
    if error.code is not Code.INVALID_ARGUMENT or attempt.media is None:
        return error
    return InvalidArgument(error.message, f"media[{attempt.media.items[key].index}]")


def _numbers(chunk: encoder_pb2.RowChunk) -> npt.NDArray[np.float32] | None:
    """Return the numbers of a chunk; None if their form is not known, or bytes are missing."""
    if chunk.type == encoder_pb2.ROW_TYPE_FLOAT32 and not len(chunk.rows) % 4:
        return np.frombuffer(chunk.rows, "<f4")
    if chunk.type == encoder_pb2.ROW_TYPE_BFLOAT16 and not len(chunk.rows) % 2:
        return (np.frombuffer(chunk.rows, "<u2").astype("<u4") << 16).view("<f4")  # the upper half of a float32
    return None


def _wrong(what: str) -> Internal:
    log.error("an encoder sent rows that cannot be used: %s", what)
    return Internal("the encoder sent rows that cannot be used")
