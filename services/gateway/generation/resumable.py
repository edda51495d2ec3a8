"""Knows the requests that their clients can resume, and keeps those whose client's connection has ended for a while."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.liveness import is_late
from tokenloom.services.runtime.tasks import Tasks

from ..records.request_ids import ResumeToken
from .admission import AdmittedCall


class Resumable(Protocol):
    """A request that a client can resume."""

    @property
    def request_id(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def takes_over(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    @property
    def ttft_seconds(self) -> float | None: ...

    async def take(self) -> object:
        """Wait for output. Raises what ended the request early."""

    def fail(self, error: errors.TokenloomError) -> None:
        """End it with an error."""

    def supersede(self) -> None:
        """Let the call end instead of sending its request again, because a later call runs it."""

    def abandon(self) -> None:
        """Go on without a client, which may come back."""

    def leave(self) -> None:
        """End the call and leave the request running, because the gateway leaves."""

    def close(self) -> None:
        """Cancel what still runs."""


R = TypeVar("R", bound=Resumable)

_AGAIN_SECONDS = 5.0
"""How long an unattended request goes on after a timer that was late."""


class UnattendedMetrics:
    """Counts the requests whose client's connection has ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.live = Gauge(
            "tokenloom_gateway_unattended_requests",
            "Requests that run without a client, because its connection ended and it can resume them.",
            registry=registry,
        )
        self.ended = Counter(
            "tokenloom_gateway_unattended_requests_ended",
            "Requests that ran without a client, by what became of them.",
            ["outcome"],
            registry=registry,
        )


@dataclass(slots=True, eq=False)
class _Entry:
    """Holds a request.

    Attributes:
        admitted: Its call, which holds the admitted request.
        held: What is to be settled when it ends, while it is unattended; None: its call does that.
    """

    request: Resumable
    tenant: str
    admitted: AdmittedCall
    held: ExitStack | None = None


class ResumableRequests:
    """Holds each resumable request from its submission to its end.

    Requests whose connection ended keep their place: they count for the limits of the gateway and of their tenant until
    they end, are resumed, or are cancelled because their time is over. So these limits bound their number and bytes.
    """

    def __init__(self, seconds: float, metrics: UnattendedMetrics, on_failure: Callable[[BaseException], None]) -> None:
        """Args:
        seconds: How long a request may run without a client; 0: not at all.
        on_failure: Gets the error of a task that fails.
        """
        self._seconds = seconds
        self._metrics = metrics
        self._tasks = Tasks(on_failure)
        self._entries: dict[Resumable, _Entry] = {}  # in order of arrival; bounded by what is admitted
        self._calls: dict[tuple[str, str], list[_Entry]] = {}  # the same by tenant and id, the latest last

    def add(self, request: Resumable, tenant: str, admitted: AdmittedCall) -> None:
        """Make a request known that was submitted. ``admitted``: its call, which holds it for the limits."""
        calls = self._calls.setdefault((tenant, request.request_id), [])
        if calls and calls[-1].held is not None and request.takes_over:
            calls[-1].request.supersede()
        self._entries[request] = entry = _Entry(request, tenant, admitted)
        calls.append(entry)

    def remove(self, request: Resumable) -> None:
        """Forget a request that has ended. Does nothing for one that is not known."""
        if (entry := self._entries.pop(request, None)) is None:
            return
        calls = self._calls[key := (entry.tenant, request.request_id)]
        calls.remove(entry)
        if not calls:
            del self._calls[key]

    def abandon(self, request: Resumable, held: ExitStack) -> bool:
        """Keep a request whose client's connection has ended. Returns False if it is not kept.

        ``held``: what the call holds; it is closed when the request ends.
        """
        entry = self._entries.get(request)
        if entry is None or not self._seconds:
            return False
        request.abandon()
        entry.held = held.pop_all()
        self._metrics.live.inc()
        self._tasks.spawn(self._run(entry), name=f"unattended {request.request_id}")
        return True

    def find(self, token: ResumeToken, tenant: str) -> AdmittedCall | None:
        """Return the hold of an unattended request, which the call that resumes or repeats it takes over; None if the
        request is not known, is attended, or has no hold because another call is about to resume it.

        Raises ``BodyChanged``, before anything is taken, if the request began with another body.
        """
        if not (calls := self._calls.get((tenant, token.request_id))):
            return None
        entry = calls[-1]
        if token.fingerprint != entry.request.fingerprint:
            raise errors.BodyChanged("The body differs from the body that this request was begun with.")
        return entry.admitted if entry.held is not None and entry.admitted.holds_admission else None

    def cancel(self, request_id: str, tenant: str) -> bool:
        """End a request: all of its calls. Returns whether it was known."""
        calls = self._calls.get((tenant, request_id), [])
        for entry in calls:
            entry.request.fail(errors.Cancelled("The client cancelled the request."))
        return bool(calls)

    def leave(self) -> None:
        """End all calls and leave their requests running, for the clients to resume through another gateway."""
        for request in tuple(self._entries):
            request.leave()

    async def close(self) -> None:
        """Cancel the requests without a client. No further one is kept."""
        self._seconds = 0.0
        await self._tasks.close()

    async def _run(self, entry: _Entry) -> None:
        """Discard the output of a request without a client: the output processor has it too."""
        request, held = entry.request, entry.held
        assert held is not None
        outcome = "cancelled"
        try:
            # Over HTTP a lost connection and a cancelled call look alike. So a request that its client can resume goes
            # on for 15 s without one: a Wi-Fi change or a restarted proxy takes seconds, and 60 s would let each
            # impatient client cost four times as much.
            while not await self._drain(request):
                if not self._is_sought(entry):
                    outcome = "expired"
                    break
            else:
                outcome = "ended"
        except Exception as error:  # a bug of one request must not end the gateway
            outcome = _outcome(wire_errors.of_exception(error))
        finally:
            self.remove(request)
            request.close()
            held.close()
            self._metrics.live.dec()
            self._metrics.ended.labels(outcome).inc()

    async def _drain(self, request: Resumable) -> bool:
        """Discard output until the end; return False if it has not come in time. The time for which this process was
        stopped does not count: the call that resumes the request may wait in a socket."""
        loop, seconds = asyncio.get_running_loop(), self._seconds
        while True:
            due = loop.time() + seconds
            try:
                async with asyncio.timeout_at(due):
                    while not request.done:
                        await request.take()
                return True
            except TimeoutError:
                if not is_late(due):
                    return False
                seconds = min(self._seconds, _AGAIN_SECONDS)

    def _is_sought(self, entry: _Entry) -> bool:
        """Return whether a later call of this gateway waits for the request: no output processor may have it now."""
        later = self._calls[entry.tenant, entry.request.request_id][-1]
        # A later call that has output found the request elsewhere, or began it anew: no client reads this one any more,
        # and no limit counts it.
        return later is not entry and later.request.ttft_seconds is None and bool(self._seconds)


def _outcome(error: errors.TokenloomError) -> str:
    """Return what became of a request that ended with an error."""
    match error:
        case errors.Aborted():
            return "resumed"
        case errors.GatewayLeaving():
            return "left"
        case errors.Cancelled():
            return "cancelled"
    return "failed"
