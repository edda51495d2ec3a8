"""Keeps requests that can be resumed: those whose gateway was lost, and for a while those that have ended."""

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit, Reservation
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.v1.output_processor_pb2 import Resume, Submit

Peer: TypeAlias = tuple[str, int]
"""A gateway's name and epoch."""

DRAIN_SECONDS = 5.0
"""Time that requests without a gateway have while the output processor drains: a client resumes within a second."""
RETURNED_SECONDS = 5.0
"""Time that a resumed request has when its gateway is back after a loss: the gateway may have had nothing of it yet,
and asks for it again."""


class RetainedRequest(Protocol):
    """A request that can be resumed."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def can_repeat(self) -> bool: ...
    @property
    def is_resumed(self) -> bool: ...

    def cancel(self) -> None:
        """End it, because its output is not wanted any more."""

    def detach(self) -> None:
        """Continue without a stream."""


R = TypeVar("R", bound=RetainedRequest)


class KeptRequests(Generic[R]):
    """Finds the requests that can be resumed by their ids.

    A request whose gateway was lost is cancelled after ``seconds``, or as soon as the same incarnation of the gateway
    connects again, because it submits its requests itself; one that it had resumed, a few seconds later. A request that
    has ended without an error is forgotten after ``seconds``, or when more recent ones fill ``max_bytes``. The limit of
    live requests bounds those that run.
    """

    def __init__(self, on_failure: Callable[[BaseException], None], seconds: float, max_bytes: int) -> None:
        """``on_failure``: gets the error of a task that fails."""
        self.tasks = Tasks(on_failure)
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._bytes = AdmissionLimit(max_bytes)
        self._by_id: dict[str, R] = {}
        self._lost: dict[str, tuple[R, Peer, asyncio.TimerHandle]] = {}  # requests without a stream
        self._ended: dict[str, tuple[R, Reservation, float]] = {}  # with bytes and time to go; the oldest first
        self._purge_timer: asyncio.TimerHandle | None = None
        self._connected: dict[Peer, int] = {}

    @property
    def num_lost(self) -> int:
        """Requests that run without a gateway."""
        return len(self._lost)

    def add(self, request: R) -> None:
        """Make a request known. One of the same id that has ended, or has no gateway, is forgotten; one that has a
        gateway and can be resumed stays known instead."""
        request_id = request.request_id
        if request_id in self._ended:
            self._forget(request_id)
        elif request_id in self._lost:
            self._lost[request_id][0].cancel()
        known = self._by_id.get(request_id)
        if known is None or not known.can_repeat:
            self._by_id[request_id] = request

    def find(self, wanted: Resume | Submit) -> R | None:
        """Return the request that a gateway wants to continue, None if it is not known, or is another tenant's.

        Raises ``BodyChanged`` if it began with another body, ``InvalidArgument`` if it has another number of samples.
        """
        if (request := self.known(wanted.request_id, wanted.tenant)) is None:
            return None
        if wanted.fingerprint and wanted.fingerprint != request.fingerprint:
            raise errors.BodyChanged("The body differs from the body that this request was begun with.")
        if request.num_samples != max(wanted.num_samples, 1):
            message = f"The request has {request.num_samples} samples, not {max(wanted.num_samples, 1)}."
            raise errors.InvalidArgument(message, "num_samples")
        return request

    def known(self, request_id: str, tenant: str) -> R | None:
        """Return a request that can be resumed; None if it is not known, or is another tenant's."""
        request = self._by_id.get(request_id)
        return None if request is None or request.tenant != tenant or not request.can_repeat else request

    def withdraw(self, request_id: str, tenant: str) -> None:
        """End a request that its client does not want any more, and forget it. Nothing happens if it is not known."""
        request = self._by_id.get(request_id)
        if request is None or request.tenant != tenant:
            return
        if request_id in self._ended:
            self._forget(request_id)
        else:
            request.cancel()

    def connect(self, peer: Peer) -> None:
        """Note a gateway's stream, and cancel requests that this incarnation lost: it submits them again, or asks for
        them again within :data:`RETURNED_SECONDS` if it had resumed them."""
        self._connected[peer] = self._connected.get(peer, 0) + 1
        for request, lost_by, timer in list(self._lost.values()):
            if lost_by != peer:
                continue
            if request.is_resumed:
                timer.cancel()
                self._keep(request, peer, min(self._seconds, RETURNED_SECONDS))
            else:
                request.cancel()

    def disconnect(self, peer: Peer) -> None:
        """Note the end of a gateway's stream."""
        self._connected[peer] -= 1
        if not self._connected[peer]:
            del self._connected[peer]

    def lose(self, request: R, peer: Peer) -> bool:
        """Keep a request whose gateway was lost. Returns False if it cannot be resumed or need not be."""
        is_known = self._by_id.get(request.request_id) is request
        # A gateway with another stream here is alive: it has ended this one itself, and still has what its requests
        # need. It does not have that of one that it had resumed when nothing had arrived: cancelled here, the request
        # was unknown to all when the gateway asked for it again, 404 for an answer that had run until then.
        is_back = peer in self._connected
        if not is_known or not request.can_repeat or (is_back and not request.is_resumed) or not self._seconds:
            return False
        request.detach()
        self._keep(request, peer, min(self._seconds, RETURNED_SECONDS) if is_back else self._seconds)
        return True

    def attached(self, request: R) -> None:
        """Note that a request has a stream again."""
        if (lost := self._lost.pop(request.request_id, None)) is not None:
            lost[2].cancel()

    def ended(self, request: R) -> None:
        """Keep the output of a request that has ended as its client asked; forget any other one."""
        request_id = request.request_id
        if self._by_id.get(request_id) is not request:
            return
        self.attached(request)
        num_bytes = request.num_bytes
        if not request.is_complete or not self._seconds or (reservation := self._reserve(num_bytes)) is None:
            del self._by_id[request_id]
            return
        until = asyncio.get_running_loop().time() + self._seconds
        self._ended[request_id] = request, reservation, until
        if self._purge_timer is None:
            self._purge_timer = asyncio.get_running_loop().call_at(until, self._purge)

    def hurry(self) -> None:
        """Wait less for gateways, because the output processor drains."""
        for request, peer, timer in list(self._lost.values()):
            timer.cancel()
            self._keep(request, peer, min(self._seconds, DRAIN_SECONDS))
        self._seconds = min(self._seconds, DRAIN_SECONDS)

    async def close(self) -> None:
        """Cancel the requests without a gateway, and forget all others."""
        for request, _, _ in list(self._lost.values()):
            request.cancel()
        for request_id in list(self._ended):
            self._forget(request_id)
        if self._purge_timer is not None:
            self._purge_timer.cancel()
        await self.tasks.close()

    def _keep(self, request: R, peer: Peer, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, request.cancel)
        self._lost[request.request_id] = request, peer, timer

    def _purge(self) -> None:
        """Forget the requests whose time is over, and wait for the next one."""
        self._purge_timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._ended:
            request_id, (_, _, until) = next(iter(self._ended.items()))
            if until > now:
                self._purge_timer = loop.call_at(until, self._purge)
                return
            self._forget(request_id)

    def _reserve(self, num_bytes: int) -> Reservation | None:
        """Reserve memory for the output of a request, in place of the oldest ones if need be; None: it never fits."""
        if num_bytes > self._max_bytes:
            return None
        while (reservation := self._bytes.take(num_bytes)) is None:
            self._forget(next(iter(self._ended)))
        return reservation

    def _forget(self, request_id: str) -> None:
        _, reservation, _ = self._ended.pop(request_id)
        reservation.release()
        del self._by_id[request_id]
