"""Sends requests at their times, however slow the answers are, and records how each ended.

Overload must not be measured through a client that becomes slow itself: a connection costs one protocol object, bodies
are made before the run, and an answer is searched for a few marks instead of being parsed.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from .http_client import Endpoint

_MAX_CONNECTIONS = 4000
"""More requests than that in flight are counted as unsent: the client would be what is measured."""
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_REFUSED = 503


@dataclass(slots=True)
class Shot:
    """Describes one request; times are seconds on the loop's clock.

    Attributes:
        lag: How much later than planned the client sent it.
        tokens: Tokens of a complete answer.
        status: The HTTP status; 0: the connection failed.
        first_at: When the first output arrived, if the request was admitted; otherwise when the answer arrived.
        ended_at: When the answer was complete.
        complete: Whether an admitted request was answered to its end without an error.
        retry_after: Seconds, for a refused request.
    """

    sent_at: float
    lag: float
    tokens: int
    status: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    complete: bool = False
    retry_after: int = 0

    @property
    def refused(self) -> bool:
        """Whether the request was refused for lack of capacity."""
        return self.status == _REFUSED

    @property
    def failed(self) -> bool:
        """Whether the request ended neither with an answer nor with a refusal."""
        return not self.complete and not self.refused


@dataclass
class Volley:
    """Holds the outcome of one run.

    Attributes:
        shots: The requests that have ended, in the order of their ends.
        num_unsent: Requests for which no connection was left.
        begun_at: When the run began, on the loop's clock.
        ended_at: When the last request was due.
    """

    begun_at: float
    shots: list[Shot] = field(default_factory=list)
    num_unsent: int = 0
    ended_at: float = 0.0


class OpenLoop:
    """Sends completions to one gateway, over connections that it keeps."""

    def __init__(self, endpoint: Endpoint, bodies: Sequence[tuple[bytes, int]]) -> None:
        """``bodies`` are sent in turn; each comes with the number of tokens of its answer."""
        self._endpoint = endpoint
        requests = [(endpoint.head(len(body)) + body, tokens) for body, tokens in bodies]
        self._requests: Iterator[tuple[bytes, int]] = cycle(requests)
        self._idle: list[_Connection] = []
        self._live: set[asyncio.Task[None]] = set()  # bounded by _MAX_CONNECTIONS

    async def run(self, rate: float, seconds: float, seed: int, *, patience: float = 30.0) -> Volley:
        """Send ``rate`` requests per second with random gaps, and return when all have ended.

        ``patience``: seconds after which a request that has not ended counts as failed.
        """
        loop = asyncio.get_running_loop()
        draw = random.Random(seed)
        volley = Volley(loop.time())
        due = volley.begun_at + draw.expovariate(rate)
        while due < volley.begun_at + seconds:
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            self.send(due, volley)
            due += draw.expovariate(rate)
        volley.ended_at = loop.time()
        await self.settle(patience)
        return volley

    async def settle(self, patience: float) -> None:
        """Return when all requests have ended, or after ``patience`` seconds."""
        if self._live:
            await asyncio.wait(self._live, timeout=patience)

    async def close(self) -> None:
        """Close the connections and give up requests that have not ended."""
        for task in self._live:
            task.cancel()
        await asyncio.gather(*self._live, return_exceptions=True)
        while self._idle:
            self._idle.pop().close()

    def send(self, due: float, volley: Volley) -> None:
        """Send the next body now, on a connection that is idle or new. ``due``: when it should have been sent."""
        if len(self._live) >= _MAX_CONNECTIONS:
            volley.num_unsent += 1
            return
        now = asyncio.get_running_loop().time()
        request, tokens = next(self._requests)
        task = asyncio.create_task(self._exchange(request, Shot(now, now - due, tokens), volley))
        self._live.add(task)
        task.add_done_callback(self._live.discard)

    async def _exchange(self, request: bytes, shot: Shot, volley: Volley) -> None:
        try:
            connection = await self._connection()
            shot.sent_at = asyncio.get_running_loop().time()
            await connection.exchange(request, shot)
            if connection.is_open:
                self._idle.append(connection)
        except OSError:
            shot.ended_at = asyncio.get_running_loop().time()
        finally:
            volley.shots.append(shot)

    async def _connection(self) -> "_Connection":
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(loop.time), self._endpoint.host, self._endpoint.port
        )
        return connection


class _Connection(asyncio.Protocol):
    """Exchanges one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_open = False
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._shot: Shot | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._left = 0
        self._is_wrong = False

    async def exchange(self, request: bytes, shot: Shot) -> None:
        """Send a request and return when its answer is complete, or the connection is closed."""
        assert self._transport is not None
        self._shot, self._head, self._tail, self._left, self._is_wrong = shot, b"", b"", 0, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(complete=False)

    def data_received(self, data: bytes) -> None:
        shot = self._shot
        if shot is None or self._done is None or self._done.done():
            return
        if not shot.status:
            self._head += data
            head, found, data = self._head.partition(_HEAD_END)
            if not found:
                return
            self._read_head(shot, head.lower())
        if shot.status != 200:
            self._left -= len(data)
            if self._left <= 0:
                self._end(complete=False)
            return
        if not shot.first_at and b"data:" in data:
            shot.first_at = self._clock()
        self._is_wrong |= b'"error"' in data
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]
        if self._tail == _LAST_CHUNK:
            self._end(complete=not self._is_wrong)

    def _read_head(self, shot: Shot, head: bytes) -> None:
        shot.status = int(head[9:12])
        self._left = _number(head, b"content-length:")
        shot.retry_after = _number(head, b"retry-after:")

    def _end(self, *, complete: bool) -> None:
        if self._shot is not None and self._done is not None and not self._done.done():
            self._shot.complete = complete
            self._shot.ended_at = self._clock()
            self._shot.first_at = self._shot.first_at or self._shot.ended_at
            self._done.set_result(None)


def _number(head: bytes, name: bytes) -> int:
    """Return the number in a header line; 0 if the line is missing."""
    _, found, rest = head.partition(name)
    return int(rest.partition(b"\r\n")[0]) if found else 0
