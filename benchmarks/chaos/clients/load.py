"""Sends requests at a steady rate: first undisturbed for their references, then under faults."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass

from . import failure
from .answer import Progress
from .comparison import difference
from .exchange import ChaosClient, Exchange
from .failure import RequestFailed
from .media import with_new_files
from .mix import Case, with_new_grammar
from .record import Record, Reference

PASSES = 2
"""How often each request is sent undisturbed; the answers must be equal."""
_JITTER = 0.5
"""Share of the interval between requests by which a request may come earlier or later."""


class Unstable(Exception):
    """Raised when an undisturbed mesh fails a request or gives two answers to it."""


@dataclass(frozen=True)
class LoadOptions:
    """How requests are sent and judged."""

    rate: float
    """Requests a second under faults."""
    reference_rate: float
    """Requests a second while the references are recorded."""
    concurrency: int
    seconds: float
    """Time limit of a request."""
    short_seconds: float | None
    """Time limit of some requests of the gRPC client; None: the same as for the others."""
    tolerance: float
    """Difference of log probabilities that is not an error."""


class Load:
    """Sends the cases with each of the clients in turns."""

    def __init__(
        self,
        clients: Sequence[ChaosClient],
        num_gateways: int,
        cases: Sequence[Case],
        options: LoadOptions,
        rng: random.Random,
    ) -> None:
        self._clients = [client for client in clients if not client.is_special]
        self._by_name = {client.name: client for client in clients}
        self._num_gateways = num_gateways
        self._cases = cases
        self._options = options
        self._rng = rng
        self._references: dict[tuple[str, str], Reference] = {}
        self._number = 0
        self._loop = asyncio.get_running_loop()

    async def record_references(self) -> None:
        """Send each case undisturbed with a client of each transport. Raises ``Unstable``."""
        clients = {
            client.transport: client for client in self._clients if not client.moves or client.transport == "grpc"
        }
        wanted = [
            (client, case)
            for _ in range(PASSES)
            for case in self._cases
            for client in ([self._by_name[case.client]] if case.client else clients.values())
        ]
        wrong: list[str] = []

        async def send(client: ChaosClient, case: Case) -> None:
            exchange = self._exchange(case, self._options.seconds)
            try:
                await self._send(client, exchange)
            except RequestFailed as error:
                wrong.append(f"{case.name} over {client.transport}: {error}")
                return
            if (found := self._keep(client.transport, exchange)) is not None:
                wrong.append(f"{case.name} over {client.transport}: {found}")

        await self._paced((send(*pair) for pair in wanted), self._options.reference_rate)
        if wrong:
            raise Unstable("the undisturbed mesh is not stable:\n" + "\n".join(wrong))

    async def run(self, least: int, is_over: Callable[[], bool], now: Callable[[], float]) -> list[Record]:
        """Send requests until at least so many were sent and ``is_over`` returns True; return what became of each.

        ``now`` is the clock of the records.
        """
        records: list[Record] = []

        def requests() -> Iterator[Coroutine[None, None, None]]:
            sent = 0
            while sent < least or not is_over():
                yield self._one(records, now)
                sent += 1

        await self._paced(requests(), self._options.rate)
        return records

    async def _one(self, records: list[Record], now: Callable[[], float]) -> None:
        case = self._rng.choice(self._cases)
        client = self._by_name.get(case.client) or self._clients[self._number % len(self._clients)]
        exchange = self._exchange(case, self._limit(client, case))
        sent = now()
        error: RequestFailed | None = None
        try:
            await self._send(client, exchange)
        except RequestFailed as failed:
            error = failed
        records.append(self._record(client, exchange, sent, now(), error))

    def _limit(self, client: ChaosClient, case: Case) -> float:
        """Return the time limit of the next request: short for some that undisturbed need at most half of it."""
        short = self._options.short_seconds
        if short is None or client.transport != "grpc" or self._number % 2:
            return self._options.seconds
        is_quick = self._references[client.transport, case.name].latency < short / 2
        return short if is_quick else self._options.seconds

    def _exchange(self, case: Case, seconds: float) -> Exchange:
        self._number += 1
        number = self._number
        case = with_new_files(with_new_grammar(case, number), number)
        # Requests of one client must not all call one gateway.
        gateway = number // len(self._clients) % self._num_gateways
        return Exchange(number, case, gateway, Progress(self._loop.time()), seconds)

    async def _send(self, client: ChaosClient, exchange: Exchange) -> None:
        """Send with a time limit, after the client's own."""
        try:
            async with asyncio.timeout(exchange.seconds + 1.0):
                await client.send(exchange)
        except TimeoutError:
            tokens = sum(len(sample.token_ids) for sample in exchange.answer.samples.values())
            calls = f"called again {exchange.resumed} times, refused {exchange.refused} times, {tokens} tokens"
            raise failure.hung(f"no end after {exchange.seconds + 1.0:.0f} s ({calls})") from None

    def _keep(self, transport: str, exchange: Exchange) -> str | None:
        """Keep the first answer as the reference; return how a later one differs."""
        progress, key = exchange.progress, (transport, exchange.case.name)
        known = self._references.get(key)
        if known is not None:
            return difference(known.answer, exchange.answer, self._options.tolerance)
        latency = self._loop.time() - progress.sent
        self._references[key] = Reference(exchange.answer, latency, progress.longest_pause or latency)
        return None

    def _pause(self, exchange: Exchange, latency: float) -> float:
        progress = exchange.progress
        if not exchange.case.streamed or progress.first is None:
            return latency
        return max(progress.longest_pause, self._loop.time() - progress.last)

    def _record(
        self, client: ChaosClient, exchange: Exchange, sent: float, ended: float, error: RequestFailed | None
    ) -> Record:
        case, progress = exchange.case, exchange.progress
        reference = self._references[client.transport, case.name]
        found = difference(reference.answer, exchange.answer, self._options.tolerance) if error is None else None
        return Record(
            number=exchange.number,
            case=case.name,
            client=client.name,
            resumes=client.resumes,
            moves=client.moves,
            gateway=exchange.gateway,
            streamed=case.streamed,
            sent=sent,
            ended=ended,
            seconds=exchange.seconds,
            ttft=progress.first - progress.sent if case.streamed and progress.first is not None else None,
            pause=self._pause(exchange, ended - sent),
            reference=reference,
            failure=None if error is None else error.kind,
            is_typed=error is not None and error.is_typed,
            detail=str(error or found or ""),
            is_wrong=found is not None,
            refused=exchange.refused,
            resumed=exchange.resumed,
        )

    async def _paced(self, requests: Iterable[Coroutine[None, None, None]], rate: float) -> None:
        """Run requests, of which ``rate`` begin in a second; a request waits while too many are under way."""
        room = asyncio.Semaphore(self._options.concurrency)
        interval = 1 / rate
        due = self._loop.time()

        async def one(request: Coroutine[None, None, None]) -> None:
            try:
                await request
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            for request in requests:
                await room.acquire()
                group.create_task(one(request))
                due = max(due + interval, self._loop.time() - interval)
                jitter = interval * self._rng.uniform(-_JITTER, _JITTER)
                await asyncio.sleep(max(due + jitter - self._loop.time(), 0))
