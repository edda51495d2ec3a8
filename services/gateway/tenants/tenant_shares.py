"""Counts what each tenant of a gateway has in work, within the tenant's limits and the gateway's, and shows it as
metrics."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenloom.request.errors import InvalidArgument, PayloadTooLarge, RateLimitExceeded, ResourceExhausted
from tokenloom.request.limits import AdmissionLimit, DividedLimit, Reservation, TokenBucket, take_of_all

from .tenant import Tenant, TenantLimits, merged, with_burst

MAX_LIVE_REQUESTS: Final = "max_live_requests"
MAX_SESSIONS: Final = "max_sessions"
MAX_QUEUE_SECONDS: Final = "max_queue_seconds"
MAX_BODY_BYTES_IN_FLIGHT: Final = "max_body_bytes_in_flight"
MAX_MEDIA_BYTES_IN_FLIGHT: Final = "max_media_bytes_in_flight"
MAX_AUDIO_BYTES_IN_FLIGHT: Final = "max_audio_bytes_in_flight"
"""Names of the gateway's own limits, for the counts of refused requests."""
LIMITS = (
    *TenantLimits.__struct_fields__,
    MAX_BODY_BYTES_IN_FLIGHT,
    MAX_LIVE_REQUESTS,
    MAX_MEDIA_BYTES_IN_FLIGHT,
    MAX_QUEUE_SECONDS,
    MAX_SESSIONS,
    MAX_AUDIO_BYTES_IN_FLIGHT,
)
"""Values of the label ``limit``: a tenant's limits by their names in the key file, and the gateway's own."""
_Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily


class TenantShare:
    """Holds the live counts of one tenant.

    A method that takes something returns its reservation. It raises ``RateLimitExceeded``, which names the limit, when
    the tenant is at a limit of its own, and ``ResourceExhausted`` when the gateway is full.

    Attributes:
        name: The tenant's name.
        limits: What applies to the tenant; None: no limit.
        bucket: Limits its tokens per second; None: no limit.
        pending_outputs: Outputs in work that have no first token yet.
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
        self.pending_outputs = self.tokens = 0
        self.refused: Counter[str] = Counter()
        self._outputs = AdmissionLimit(limits.live_outputs)
        self._sessions = AdmissionLimit(limits.sessions)
        self._bytes = AdmissionLimit(limits.body_bytes)
        self._messages = AdmissionLimit(None)  # of these bytes, those of the gRPC API
        self._media = AdmissionLimit(None)
        self._sounds = AdmissionLimit(None)
        self._grammars: Counter[bytes] = Counter()  # pending requests by grammar; bounded by the live outputs

    @property
    def live_outputs(self) -> int:
        """Prompts times samples in work."""
        return self._outputs.taken

    @property
    def sessions(self) -> int:
        """Open streams of requests: those of ``GenerateSession`` and ``ModelStreamInfer``."""
        return self._sessions.taken

    @property
    def body_bytes(self) -> int:
        """Size of the request bodies that the gateway holds."""
        return self._bytes.taken

    @property
    def pending_grammars(self) -> int:
        """Different grammars of requests that have not produced their first token."""
        return len(self._grammars)

    def take_outputs(self, wanted: int, room: DividedLimit) -> Reservation:
        """Take places for outputs. Raises ``InvalidArgument`` if so many never may be in work. ``room``: the
        gateway's."""
        limit = self.limits.live_outputs
        if limit is not None and wanted > limit:
            self.refused["live_outputs"] += 1
            message = f"the request asks for {wanted} outputs; this tenant's limit live_outputs is {limit}"
            raise InvalidArgument(message, "n")
        if limit is not None and not self._outputs.can_take(wanted):
            raise self._limited("live_outputs", f"{self.live_outputs} outputs of this tenant are in work", limit)
        # Divided by what is free, and not by the number of tenants: first come, first served let 1,200 idle sessions of
        # one key refuse all others, and fixed parts for many keys would leave most of the gateway unused.
        if not room.can_take(wanted, self._outputs.taken):
            self.refused[MAX_LIVE_REQUESTS] += 1
            raise ResourceExhausted("too many requests are running; retry later")
        return take_of_all(wanted, self._outputs, room)

    def take_grammar(self, grammar: bytes) -> Reservation:
        """Count a request whose output follows a grammar, until it has its first token or has ended before; requests
        with the same grammar count once."""
        limit = self.limits.pending_grammars
        # Grammars are counted, not requests: compiling takes a compiler's time once, and many requests of one schema
        # are common.
        if limit is not None and grammar not in self._grammars and len(self._grammars) >= limit:
            state = f"{len(self._grammars)} structured outputs of this tenant wait for their first token"
            raise self._limited("pending_grammars", state, limit)
        self._grammars[grammar] += 1
        return Reservation(partial(self._remove_grammar, grammar), 1)

    def _remove_grammar(self, grammar: bytes, count: int) -> None:
        self._grammars[grammar] -= count
        if not self._grammars[grammar]:
            del self._grammars[grammar]

    def take_session(self, room: DividedLimit) -> Reservation:
        """Take the place of a session. ``room``: the gateway's."""
        limit = self.limits.sessions
        if limit is not None and not self._sessions.can_take(1):
            raise self._limited("sessions", f"{self.sessions} sessions of this tenant are open", limit)
        if not room.can_take(1, self._sessions.taken):
            self.refused[MAX_SESSIONS] += 1
            raise ResourceExhausted(f"the gateway has {room.taken} of {room.size} sessions open; retry later")
        return take_of_all(1, self._sessions, room)

    def take_bytes(self, wanted: int, size: int) -> Reservation:
        """Take room for bytes of a request's body, which has ``size`` bytes with them. Raises ``PayloadTooLarge`` for a
        body that is above the limit alone."""
        if self.limits.body_bytes is not None:
            self._check_bytes(wanted, size, self.limits.body_bytes)
        return self._bytes.take_anyway(wanted)

    def take_message(self, size: int, room: DividedLimit) -> Reservation:
        """Take room for a message of the gRPC API of ``size`` bytes. ``room``: the gateway's. Errors as in
        :meth:`take_bytes`."""
        if self.limits.body_bytes is not None:
            self._check_bytes(size, size, self.limits.body_bytes)
        # By what it holds of this room only: bodies over HTTP have a budget of their own.
        if not room.can_take(size, self._messages.taken):
            self.refused[MAX_BODY_BYTES_IN_FLIGHT] += 1
            state = f"the gateway holds {room.taken} of {room.size} bytes of messages that are not answered"
            raise ResourceExhausted(f"{state}; retry", retry_after=1.0)
        return take_of_all(size, self._bytes, self._messages, room)

    def take_media(self, size: int, room: DividedLimit) -> Reservation:
        """Take room for ``size`` bytes of images and sounds of requests in work. ``room``: the gateway's. Raises
        ``ResourceExhausted``."""
        if not room.can_take(size, self._media.taken):
            self.refused[MAX_MEDIA_BYTES_IN_FLIGHT] += 1
            state = f"the gateway holds {room.taken} of {room.size} bytes of files of requests in work"
            raise ResourceExhausted(f"{state}; retry", retry_after=1.0)
        return take_of_all(size, self._media, room)

    def take_sound(self, size: int, room: DividedLimit) -> Reservation:
        """Take room for ``size`` bytes of an uploaded sound on disk. ``room``: the gateway's. Raises
        ``ResourceExhausted``."""
        if not room.can_take(size, self._sounds.taken):
            self.refused[MAX_AUDIO_BYTES_IN_FLIGHT] += 1
            state = f"the gateway holds {room.taken} of {room.size} bytes of sounds of requests in work"
            raise ResourceExhausted(f"{state}; retry", retry_after=1.0)
        return take_of_all(size, self._sounds, room)

    @property
    def sound_bytes(self) -> int:
        """Bytes of uploaded sounds of requests in work."""
        return self._sounds.taken

    @property
    def media_bytes(self) -> int:
        """Bytes of images and sounds of requests in work."""
        return self._media.taken

    def _check_bytes(self, wanted: int, size: int, limit: int) -> None:
        if size > limit:
            self.refused["body_bytes"] += 1
            raise PayloadTooLarge(f"the body has {size} bytes or more; this tenant's limit body_bytes is {limit}")
        if not self._bytes.can_take(wanted):
            state = f"the gateway holds {self.body_bytes} bytes of this tenant's requests, and {wanted} would be added"
            raise self._limited("body_bytes", state, limit)

    def take_tokens(self, num_prompt: int, num_output: int, *, is_bounded: bool) -> Reservation | None:
        """Take the tokens that a request may use; return None where they are not limited.

        ``num_output``: limit of all its outputs together. ``is_bounded``: the client has set ``max_tokens``. A request
        without it may run to the end of the context; it reserves at most the whole bucket, and :meth:`charge` makes it
        a debt if it needs more. Raises ``InvalidArgument`` for a request that is larger than the bucket.
        """
        if (bucket := self.bucket) is None:
            return None
        wanted, burst = num_prompt + num_output, bucket.burst
        if wanted > burst:
            if is_bounded:
                self.refused["token_burst"] += 1
                message = f"the request may use {num_prompt} prompt tokens and {num_output} output tokens"
                raise InvalidArgument(f"{message}; this tenant's limit token_burst is {burst}", "max_tokens")
            wanted = burst
        if (reserved := bucket.take(wanted)) is None:
            state = f"the request may use {wanted} tokens, and this tenant has {max(int(bucket.level), 0)} left"
            raise self._limited("tokens_per_second", state, bucket.rate, bucket.wait_seconds(wanted))
        return reserved

    def charge(self, reserved: Reservation | None, used: int) -> None:
        """Replace a reservation by the tokens that the request used. None: the tenant's tokens are not limited."""
        self.tokens += used
        if reserved is not None and self.bucket is not None:
            self.bucket.spend(used)
            reserved.release()

    def _limited(self, name: str, state: str, limit: float, retry_after: float = 1.0) -> RateLimitExceeded:
        """Count a refusal and return its error. ``state``: how much the tenant has of what is limited."""
        self.refused[name] += 1
        message = f"{state}; the tenant's limit {name} is {limit:g}; retry later"
        return RateLimitExceeded(message, limit=name, retry_after=retry_after)


class TenantShares:
    """Finds the share of a tenant. Only tenants that have sent a request have one, so metrics name no others.

    Attributes:
        outputs: The gateway's places for outputs in work.
        sessions: Its places for open sessions.
        messages: Its room for the bytes of gRPC messages that are not answered.
        media: Its room for the bytes of images and sounds of requests in work.
        sounds: Its room on disk for the sounds of requests that transcribe them.
        is_shared: Whether the gateway has several tenants.
    """

    def __init__(
        self,
        defaults: TenantLimits,
        *,
        is_shared: bool,
        max_live: int,
        max_sessions: int,
        max_message_bytes: int,
        max_media_bytes: int = 0,
        max_sound_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        defaults: The limits of tenants that have none of their own.
        is_shared: Whether the gateway has several tenants.
        max_live: Outputs that may be in work.
        max_sessions: Sessions that may be open.
        max_message_bytes: Bytes of gRPC messages that may be held until they are answered.
        max_media_bytes: Bytes of images and sounds that may be held while their requests run.
        max_sound_bytes: Bytes of uploaded sounds that may be on disk while their requests run.
        clock: Seconds, for the tokens per second.
        """
        self.is_shared = is_shared
        self.outputs = DividedLimit(max_live, is_divided=is_shared)
        self.sessions = DividedLimit(max_sessions, is_divided=is_shared)
        self.messages = DividedLimit(max_message_bytes, is_divided=is_shared)
        self.media = DividedLimit(max_media_bytes, is_divided=is_shared)
        self.sounds = DividedLimit(max_sound_bytes, is_divided=is_shared)
        self._defaults = defaults
        self._clock = clock
        self._shares: dict[str, TenantShare] = {}  # bounded by the tenants of the key file

    def of(self, tenant: Tenant) -> TenantShare:
        """Return the share of a tenant."""
        share = self._shares.get(tenant.name)
        if share is None:
            limits = with_burst(merged(tenant.limits, self._defaults))
            share = self._shares[tenant.name] = TenantShare(tenant.name, limits, self._clock)
        return share

    def __iter__(self) -> Iterator[TenantShare]:
        return iter(list(self._shares.values()))  # a copy: a scrape runs in a thread of its own


@dataclass(frozen=True, slots=True)
class TenantMetrics:
    """Collects the tenants' counts for Prometheus when it scrapes, so a request pays nothing for them.

    The label ``tenant`` is a name from the key file, ``key:`` and the start of a digest for a key without a name, and
    empty where clients need no key.
    """

    shares: TenantShares

    def collect(self) -> Iterator[_Family]:
        for name, text in (
            ("live_outputs", "Outputs of the tenant in work: prompts times samples."),
            ("sessions", "Open sessions of the tenant, streams of the Open Inference Protocol included."),
            ("pending_grammars", "Different grammars of the tenant's requests that wait for their first token."),
            ("body_bytes", "Bytes of the tenant's request bodies that the gateway holds."),
            ("media_bytes", "Bytes of the tenant's images that the gateway holds while their requests run."),
            ("sound_bytes", "Bytes of the tenant's uploaded sounds on the gateway's disk while their requests run."),
        ):
            gauge = GaugeMetricFamily(f"tokenloom_tenant_{name}", text, labels=["tenant"])
            for share in self.shares:
                gauge.add_metric([share.name], getattr(share, name))
            yield gauge
        tokens = CounterMetricFamily(
            "tokenloom_tenant_tokens", "Prompt and output tokens charged to the tenant.", labels=["tenant"]
        )
        text = "Requests of the tenant that were refused, by the limit that refused them."
        refused = CounterMetricFamily("tokenloom_tenant_refused_requests", text, labels=["tenant", "limit"])
        for share in self.shares:
            tokens.add_metric([share.name], share.tokens)
            for limit in LIMITS:
                refused.add_metric([share.name, limit], share.refused[limit])
        yield tokens
        yield refused

    describe = collect  # the names, so that a second metric of one of them is refused
