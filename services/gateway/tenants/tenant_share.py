"""Counts what one tenant has in work, within the tenant's limits."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tokenloom.request.errors import InvalidArgument, PayloadTooLarge, RateLimitExceeded, ResourceExhausted

from .room import Room
from .tenant import TenantLimits
from .token_bucket import TokenBucket

MAX_LIVE_REQUESTS: Final = "max_live_requests"
MAX_SESSIONS: Final = "max_sessions"
MAX_QUEUE_SECONDS: Final = "max_queue_seconds"
"""Names of the gateway's own limits, for the counts of refused requests."""


class TenantShare:
    """Holds the live counts of one tenant.

    A method that adds to a count raises ``RateLimitExceeded``, which names the limit, when the tenant is at a limit of
    its own, and ``ResourceExhausted`` when the gateway is full. What was added is subtracted once, by the caller.

    Attributes:
        name: The tenant's name.
        limits: What applies to the tenant; None: no limit.
        bucket: Limits its tokens per second; None: no limit.
        live_outputs: Prompts times samples in work.
        pending_outputs: Those that have no first token yet.
        sessions: Open streams of ``GenerateSession``.
        body_bytes: Size of the request bodies that the gateway holds.
        tokens: Prompt and output tokens charged so far, in total.
        refused: By the name of a limit, how many requests were refused for it.
    """

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, for the tokens per second."""
        self.name = name
        self.limits = limits
        self.bucket: TokenBucket | None = None
        if limits.tokens_per_second is not None and limits.token_burst is not None:
            self.bucket = TokenBucket(limits.tokens_per_second, limits.token_burst, clock)
        self.live_outputs = self.pending_outputs = self.sessions = self.body_bytes = self.tokens = 0
        self.refused: Counter[str] = Counter()
        self._grammars: Counter[bytes] = Counter()  # pending requests by grammar; bounded by the live outputs

    @property
    def pending_grammars(self) -> int:
        """Different grammars of requests that have not produced their first token."""
        return len(self._grammars)

    def add_outputs(self, added: int, room: Room) -> None:
        """Add outputs to those in work. Raises ``InvalidArgument`` if so many never may be. ``room``: the gateway's."""
        limit = self.limits.live_outputs
        if limit is not None and added > limit:
            self.refused["live_outputs"] += 1
            message = f"the request asks for {added} outputs; this tenant's limit live_outputs is {limit}"
            raise InvalidArgument(message, "n")
        if limit is not None and self.live_outputs + added > limit:
            raise self._limited("live_outputs", f"{self.live_outputs} outputs of this tenant are in work", limit)
        if not room.take(self.live_outputs, added):
            self.refused[MAX_LIVE_REQUESTS] += 1
            raise ResourceExhausted("too many requests are running; retry later")
        self.live_outputs += added

    def remove_outputs(self, removed: int, room: Room) -> None:
        """Subtract outputs that have ended."""
        self.live_outputs -= removed
        room.give_back(removed)

    def add_grammar(self, grammar: bytes) -> None:
        """Add a request whose output follows a grammar; requests with the same one count once."""
        limit = self.limits.pending_grammars
        if limit is not None and grammar not in self._grammars and len(self._grammars) >= limit:
            state = f"{len(self._grammars)} structured outputs of this tenant wait for their first token"
            raise self._limited("pending_grammars", state, limit)
        self._grammars[grammar] += 1

    def remove_grammar(self, grammar: bytes) -> None:
        """Subtract a request that has produced its first token or has ended before."""
        self._grammars[grammar] -= 1
        if not self._grammars[grammar]:
            del self._grammars[grammar]

    @contextmanager
    def session(self, room: Room) -> Iterator[None]:
        """Keep a session open for the length of the ``with`` block. ``room``: the gateway's."""
        limit = self.limits.sessions
        if limit is not None and self.sessions >= limit:
            raise self._limited("sessions", f"{self.sessions} sessions of this tenant are open", limit)
        if not room.take(self.sessions, 1):
            self.refused[MAX_SESSIONS] += 1
            raise ResourceExhausted(f"the gateway has {room.taken} of {room.size} sessions open; retry later")
        self.sessions += 1
        try:
            yield
        finally:
            self.sessions -= 1
            room.give_back(1)

    def add_bytes(self, added: int, size: int) -> None:
        """Add bytes of a request's body, which has ``size`` bytes with them. Raises ``PayloadTooLarge`` for a body that
        is above the limit alone."""
        limit = self.limits.body_bytes
        if limit is not None and size > limit:
            self.refused["body_bytes"] += 1
            raise PayloadTooLarge(f"the body has {size} bytes or more; this tenant's limit body_bytes is {limit}")
        if limit is not None and self.body_bytes + added > limit:
            state = f"the gateway holds {self.body_bytes} bytes of this tenant's requests, and {added} would be added"
            raise self._limited("body_bytes", state, limit)
        self.body_bytes += added

    def remove_bytes(self, size: int) -> None:
        """Subtract the size of a body that the gateway does not hold any more."""
        self.body_bytes -= size

    @contextmanager
    def body(self, size: int) -> Iterator[None]:
        """Count a message of the gRPC API for the length of the ``with`` block. ``size``: bytes."""
        self.add_bytes(size, size)
        try:
            yield
        finally:
            self.remove_bytes(size)

    def reserve_tokens(self, num_prompt: int, num_output: int, *, is_bounded: bool) -> int:
        """Reserve the tokens that a request may use, and return their number.

        ``num_output``: limit of all its outputs together. ``is_bounded``: the client has set ``max_tokens``. A request
        without it may run to the end of the context; it reserves at most the whole bucket, and :meth:`charge` makes it
        a debt if it needs more. Raises ``InvalidArgument`` for a request that is larger than the bucket.
        """
        if self.bucket is None:
            return 0
        wanted, burst = num_prompt + num_output, self.bucket.burst
        if wanted > burst:
            if is_bounded:
                self.refused["token_burst"] += 1
                message = f"the request may use {num_prompt} prompt tokens and {num_output} output tokens"
                raise InvalidArgument(f"{message}; this tenant's limit token_burst is {burst}", "max_tokens")
            wanted = burst
        if wait := self.bucket.reserve(wanted):
            state = f"the request may use {wanted} tokens, and this tenant has {max(int(self.bucket.level), 0)} left"
            raise self._limited("tokens_per_second", state, self.bucket.rate, wait)
        return wanted

    def charge(self, reserved: int, used: int) -> None:
        """Replace a reservation by the tokens that the request used."""
        self.tokens += used
        if self.bucket is not None:
            self.bucket.settle(reserved, used)

    def _limited(self, name: str, state: str, limit: float, retry_after: float = 1.0) -> RateLimitExceeded:
        """Count a refusal and return its error. ``state``: how much the tenant has of what is limited."""
        self.refused[name] += 1
        message = f"{state}; the tenant's limit {name} is {limit:g}; retry later"
        return RateLimitExceeded(message, limit=name, retry_after=retry_after)
