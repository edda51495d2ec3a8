"""Admits requests, within the capacity of the mesh and the limits of their tenants. Estimates how long a new one would
wait for its first token, to decide whether it is admitted."""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Final, Self

from tokenloom.request import errors, validation
from tokenloom.request.limits import Reservation
from tokenloom.services.runtime.telemetry.logs import RareLine

from ..mesh.mesh_view import Capacity
from ..records.generate_request import Chat, GenerateRequest
from ..settings.gateway_settings import ALWAYS_QUEUED
from ..tenants.tenant_shares import MAX_QUEUE_SECONDS, TenantShare, TenantShares
from .encoded_prompt import BYTES_PER_TOKEN, estimated_tokens

if TYPE_CHECKING:
    from ..metrics.gateway_metrics import PromiseOutcome
    from .promises import Forecast, Promises

log = logging.getLogger(__name__)

UNMEASURED_WAITING: Final = 256
"""Requests that may wait before any rate was measured, if not more of them run: few enough to be answered by any
engine, and more than a mesh without load ever refuses."""
POOLED_AT_ONCE: Final = 256
"""Prompts of all pooling calls that are in work at the same time; tenants take turns. The others wait here."""
SPARE_SEATS: Final = 0.75
"""Part of the engines' seats that may be taken when a sheddable request begins: it cannot be moved away under the
policy fcfs, so seats stay free for requests that come later."""
SPARE_SECONDS: Final = 0.25
"""How long a sheddable request may wait: longer, and requests that come later would wait behind it."""


class WaitEstimator:
    """Counts the requests of this gateway that are live, and the prompt tokens of those without a first token.

    A request waits for the prompts before it, and for a seat if all are taken; the longer of the two is its wait. The
    gateway knows its own requests exactly. The requests of other gateways are the rest of what the coordinator's last
    snapshot shows.
    """

    def __init__(
        self, max_queue_seconds: float, draw: Random | None = None, *, always_queued: int = ALWAYS_QUEUED
    ) -> None:
        """``max_queue_seconds``: how long a request of priority 0 may wait. ``draw``: spreads the times of retries.
        ``always_queued``: outputs of this gateway that may wait in any case."""
        self._max_seconds = max_queue_seconds
        self.always_queued = always_queued
        self.draw = draw or SystemRandom()
        self._capacity = Capacity(serves=False)
        self._other_live = self._other_tokens = 0
        self.live = 0
        """Outputs of this gateway in work."""
        self.pooled = 0
        """Those among them that are vectors or scores."""
        self.pending = 0
        """Outputs among them that have no first token yet."""
        self.pending_tokens = 0
        """Prompt tokens of those; each prompt counts once."""
        self.early = 0
        """Calls that wait for the first engine before they can be admitted: it says what they may ask for."""

    def observe(self, capacity: Capacity) -> None:
        """Take the capacity and the load of a new snapshot."""
        self._capacity = capacity
        # Own requests are counted exactly and at once. Read from the snapshot, which is up to 0.2 s old, a burst would
        # be admitted as a whole before the first of it shows there.
        self._other_live = max(capacity.live - self._num_sent(), 0)
        self._other_tokens = max(capacity.waiting_tokens - self.pending_tokens, 0)

    def _num_sent(self) -> int:
        """Return how many outputs are at the engines, or on their way."""
        return self.live - max(self.pooled - POOLED_AT_ONCE, 0)

    def wait_seconds(self, timeout: float = math.inf) -> float:
        """Return how long a request that came now would wait, and may take. It is 0 while the capacity is not known."""
        capacity = self._capacity
        if not capacity.seats:
            return 0.0
        for_compute = for_seat = 0.0
        if capacity.prefill_tokens_per_second:
            for_compute = (self.pending_tokens + self._other_tokens) / capacity.prefill_tokens_per_second
        num_before = self._num_sent() + self._other_live + 1 - capacity.seats
        if num_before > 0:
            # A mesh that has just started has no rates yet. Taking its seats for all that it can start in the allowed
            # time, it refused its first small queue.
            is_unknown = not (capacity.starts_per_second or capacity.prefill_tokens_per_second)
            unmeasured = max(capacity.seats, UNMEASURED_WAITING) / min(self._max_seconds, timeout)
            starts = unmeasured if is_unknown else capacity.starts_per_second
            for_seat = num_before / starts if starts else 0.0
        # The longer, not the sum: prompts before a request are computed while it waits for a seat.
        return max(for_compute, for_seat)

    def first_token_seconds(self, num_tokens: int) -> float | None:
        """Return after how many seconds a request that came now would have its first token, as far as rates are known;
        None: no engine serves. ``num_tokens``: of its prompts."""
        if not self._capacity.serves:
            return None
        rate = self._capacity.prefill_tokens_per_second
        return self.wait_seconds() + (num_tokens / rate if rate else 0.0)

    def check(self, priority: int, timeout: float, *, queue_share: float = 1.0, is_sheddable: bool = False) -> None:
        """Raise ``ResourceExhausted``, with the time after which a retry may succeed, if a request would wait for too
        long: longer than its priority permits, or than it may take at all.

        Args:
            priority: Lower values are more urgent; 0 is the default.
            timeout: Seconds that the whole request may take.
            queue_share: The part of the queue that runs before it, 0 to 1: engines take the tenants' requests in turn,
                so a tenant with few requests does not wait for all requests of another one.
            is_sheddable: It may run only with capacity that no other request needs.
        """
        if is_sheddable:
            self._check_spare()
            return
        if self.pending * queue_share < self.always_queued:
            return
        wait, allowed = self.wait_seconds(timeout) * queue_share, min(self._allowed_seconds(priority), timeout)
        if wait <= allowed:
            return
        # Spread, so that clients that were refused in one burst do not come back in one.
        retry_after = max(wait, 1.0) * self.draw.uniform(0.5, 1.5)
        raise errors.ResourceExhausted(
            f"The model is at capacity: the request would wait about {wait:.3g} s for its first token, and it may wait "
            f"{allowed:.3g} s; retry later.",
            retry_after=retry_after,
        )

    def _check_spare(self) -> None:
        """Raise ``ResourceExhausted`` unless a request could begin at once, and would leave seats for others."""
        seats, num_live = self._capacity.seats, self._num_sent() + self._other_live
        has_seat = not seats or num_live + 1 <= max(seats * SPARE_SEATS, 1)
        if has_seat and self.wait_seconds() <= SPARE_SECONDS:
            return
        message = "The model is busy with more important requests; retry later."
        raise errors.ResourceExhausted(message, retry_after=self.draw.uniform(0.5, 1.5))

    def add(self, num_outputs: int, num_tokens: int) -> None:
        """Count an admitted request."""
        self.live += num_outputs
        self.pending += num_outputs
        self.pending_tokens += num_tokens

    def begin(self, num_outputs: int, num_tokens: int) -> None:
        """Note that outputs have their first token, or will never have one. ``num_tokens``: of their prompts."""
        self.pending -= num_outputs
        self.pending_tokens -= num_tokens

    def end(self, num_outputs: int) -> None:
        """Note that outputs have ended."""
        self.live -= num_outputs

    def _allowed_seconds(self, priority: int) -> float:
        """Return how long a request may wait: less the less important it is, so that the least important requests are
        refused first, and up to twice as long if it is urgent, because the scheduler puts it before others."""
        if priority >= 0:
            return self._max_seconds / (1 + priority)
        return self._max_seconds * (2 - 1 / (1 - priority))


def estimate_prompt_tokens(request: GenerateRequest) -> int:
    """Return roughly how many tokens the prompts have, without encoding them."""
    if isinstance(request.prompts, Chat):
        return (len(request.prompts.messages_json) + len(request.prompts.tools_json)) // BYTES_PER_TOKEN
    return len(request.before) + sum(map(estimated_tokens, request.prompts))


_LOG_SECONDS: Final = 10.0
_SHUTTING_DOWN = "the gateway is shutting down; retry"
MAX_PROMPTS = 1024
"""Limit on the prompts of one request."""


class RequestAdmission:
    """Admits requests until the gateway drains.

    A request is admitted or refused here and nowhere else, before anything is spent on it: the mesh behind the gateway
    has room for every request that this rule admits.
    """

    def __init__(
        self,
        shares: TenantShares,
        estimator: WaitEstimator,
        most_urgent_priority: int = 0,
        count_promise: "Callable[[PromiseOutcome], None]" = lambda _: None,
    ) -> None:
        """``most_urgent_priority``: the lowest priority that a client gets, whatever it asks for. ``count_promise``:
        called once for each request that has a deadline for its first token."""
        self._count_promise = count_promise
        self._promises: Promises | None = None  # until the first such request: others then cost nothing for it
        self._shares = shares
        self._estimator = estimator
        self._refusals = RareLine(_LOG_SECONDS, asyncio.get_running_loop().time)
        self._most_urgent_priority = most_urgent_priority
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_admitted = 0
        self._num_old: int | None = None
        self._old_ended = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Outputs in work."""
        return self._shares.outputs.taken

    def admit(
        self, request: GenerateRequest, timeout: float, *, most_at_once: int = 0, was_accepted: bool = False
    ) -> "AdmittedRequest":
        """Return the admitted request, which holds its part of the tenant's share until it is closed.

        ``timeout``: seconds that the request may take. ``most_at_once``: outputs that are in work at the same time, for
        a request whose prompts take turns; a tenant with a lower limit has fewer; 0: all. ``was_accepted``: by another
        gateway, which was lost, so that it is not refused because the mesh is busy.

        Raises ``Unavailable`` while the gateway drains, ``ResourceExhausted`` when the request would wait for too long,
        ``RateLimitExceeded`` when the tenant is at a limit, ``InvalidArgument`` for too many prompts or samples.
        """
        if self._draining and not request.is_continued:
            raise errors.Unavailable(_SHUTTING_DOWN)
        share, estimator = self._shares.of(request.tenant), self._estimator
        if most_at_once:
            num_outputs = _num_at_once(request, share, most_at_once)
        else:
            is_one = request.num_samples == 1 and isinstance(request.prompts, Chat)
            num_outputs = 1 if is_one else _num_outputs(request)
        seats = share.take_outputs(num_outputs, self._shares.outputs)
        try:
            # Admitted here and nowhere else: while four parts each limited requests by a count, 2,600 at once were
            # admitted up to 2,048, and none was answered in time.
            if not was_accepted and (request.is_sheddable or estimator.pending >= estimator.always_queued):
                self._check_wait(request, share, timeout)
            num_tokens, forecast = estimate_prompt_tokens(request), None
            if request.ttft_deadline is not None or (self._promises is not None and not most_at_once):
                forecast = self._forecast(num_tokens, request.ttft_deadline)
            grammar = _take_grammar(request, share) if request.sampling.HasField("structured_outputs") else None
        except errors.TokenloomError:
            seats.release()
            raise
        self._idle.clear()
        self._num_admitted += 1
        num_pooled = num_outputs if most_at_once else 0
        estimator.pooled += num_pooled
        leave = partial(self._leave, num_outputs, num_pooled, is_new=self._num_old is not None)
        return AdmittedRequest(
            share, estimator, seats, leave, num_tokens=num_tokens, grammar=grammar, forecast=forecast
        )

    def _forecast(self, num_tokens: int, deadline: float | None) -> "Forecast | None":
        """Return what is expected of a request, whether it has a deadline or not: forecasts become good by those that
        have none, too. None: it has none, and waits for an engine to serve. Raises as :meth:`Promises.open`."""
        if self._promises is None:
            from .promises import Promises  # here: most gateways promise nothing

            clock, draw = asyncio.get_running_loop().time, self._estimator.draw
            self._promises = Promises(clock, draw, self._count_promise)
        seconds = self._estimator.first_token_seconds(num_tokens)
        if seconds is None and deadline is None:
            return None
        return self._promises.open(seconds, deadline)

    def take_files(self, request: GenerateRequest) -> Reservation:
        """Take room for the files of a request's images that no large body holds. Raises ``ResourceExhausted``."""
        assert isinstance(request.prompts, Chat)
        size = sum(part.file.num_bytes for part in request.prompts.media if part.file is not None)
        room = self._shares.media
        return self._shares.of(request.tenant).take_media(size, room) if size else room.empty()

    def check_open(self) -> None:
        """Raise ``Unavailable`` while the gateway drains."""
        if self._draining:
            raise errors.Unavailable(_SHUTTING_DOWN)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a call that makes several requests, one after the other, so that a drain waits for its last one. Raises
        ``Unavailable`` while the gateway drains."""
        self.check_open()
        self._idle.clear()
        self._num_admitted += 1
        is_new = self._num_old is not None
        try:
            yield
        finally:
            self._leave(0, 0, is_new=is_new)

    @contextmanager
    def come_early(self) -> Iterator[None]:
        """Count a call that waits for the first engine before it can be admitted."""
        self._estimator.early += 1
        try:
            yield
        finally:
            self._estimator.early -= 1

    async def drain(self) -> None:
        """Refuse new requests, and return when none is in work."""
        self._draining = True
        await self._idle.wait()

    async def end_of_present(self) -> None:
        """Return when the requests that are in work now have ended; new ones are still admitted. To be called once."""
        self._num_old = self._num_admitted
        if self._num_old:
            await self._old_ended.wait()

    def _leave(self, num_outputs: int, num_pooled: int, *, is_new: bool) -> None:
        """Subtract a request that has ended. ``is_new``: it came after :meth:`end_of_present`."""
        self._num_admitted -= 1
        if self._num_old and not is_new:
            self._num_old -= 1
            if not self._num_old:
                self._old_ended.set()
        self._estimator.end(num_outputs)
        self._estimator.pooled -= num_pooled
        if not self._num_admitted:  # other meshes of this gateway may have outputs in work
            self._idle.set()

    def _check_wait(self, request: GenerateRequest, share: TenantShare, timeout: float) -> None:
        """Raise ``ResourceExhausted`` for a request that would wait for too long."""
        estimator, queue_share = self._estimator, 1.0
        if self._shares.is_shared and estimator.pending:
            # As much of the queue runs before the request for each tenant that waits as this tenant has there itself.
            num_others = sum(other.pending_outputs > 0 for other in self._shares if other is not share)
            queue_share = min((num_others + 1) * share.pending_outputs / estimator.pending, 1.0)
        priority = max(request.priority, self._most_urgent_priority)
        try:
            estimator.check(priority, timeout, queue_share=queue_share, is_sheddable=request.is_sheddable)
        except errors.ResourceExhausted as error:
            if request.is_sheddable:  # it is tried again until there is capacity: no client was refused
                raise
            share.refused[MAX_QUEUE_SECONDS] += 1
            if count := self._refusals.add():
                log.warning("requests refused since the last such line: %d; %s", count, error.message)
            raise


class AdmittedRequest:
    """Holds what one request has of its tenant's share, until it is closed. Its outputs count as pending until each has
    its first token.

    Attributes:
        num_outputs: Outputs that may be in work at the same time.
        num_used: Tokens to charge for it; set before it is closed.
    """

    def __init__(
        self,
        share: TenantShare,
        estimator: WaitEstimator,
        seats: Reservation,
        leave: Callable[[], None],
        *,
        num_tokens: int,
        grammar: Reservation | None = None,
        forecast: "Forecast | None" = None,
    ) -> None:
        """Args:
        seats: Of its outputs, at the tenant and at the gateway.
        leave: Ends its presence at the mesh.
        num_tokens: An estimate of its prompt tokens.
        grammar: Held until the first token; None: the output follows none.
        forecast: Of its first token; None: no deadline needs one.
        """
        self._forecast = forecast
        self.num_outputs = self._num_pending = seats.amount
        self.num_used = 0
        self._share = share
        self._estimator = estimator
        self._seats = seats
        self._leave = leave
        self._num_pending_tokens = num_tokens
        self._grammar = grammar
        self._begun: set[int] = set()
        self._tokens: Reservation | None = None
        self._has_tokens = self._is_closed = False
        estimator.add(self.num_outputs, num_tokens)
        share.pending_outputs += self.num_outputs

    @property
    def is_beside_answers(self) -> bool:
        """Whether the gateway has outputs in work that are generated."""
        return self._estimator.live > self._estimator.pooled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def take_tokens(self, num_prompt: int, num_output: int = 0, *, is_bounded: bool = True) -> None:
        """Take the tokens that the prompts and all their outputs may use, before any of them is sent. A request that
        was taken over from another of its calls has them already.

        ``is_bounded``: the client has set the limit of the outputs. Raises as :meth:`TenantShare.take_tokens`.
        """
        if self._has_tokens:
            return
        self._tokens = self._share.take_tokens(num_prompt, num_output, is_bounded=is_bounded)
        self._has_tokens = True
        self._estimator.pending_tokens += num_prompt - self._num_pending_tokens
        self._num_pending_tokens = num_prompt  # known now, and no estimate any more

    def begin_output(self, index: int) -> None:
        """Take note of the first token of an output: its prompt was computed, and the grammar has been compiled."""
        if index not in self._begun:  # a call that resumes the request gets the first token again
            if self._forecast is not None:
                self._forecast.begin()
                self._forecast = None
            self._begun.add(index)
            self._end_wait(1)

    def close(self) -> None:
        """Return what the request holds, and charge the tokens that it used. A second call has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._forecast is not None:
            self._forecast.end()
        self._end_wait(self._num_pending)
        if self._has_tokens:
            self._share.charge(self._tokens, self.num_used)
        self._seats.release()
        self._leave()

    def _end_wait(self, num_outputs: int) -> None:
        """Subtract outputs that have their first token, or never will, with their part of the prompt tokens."""
        if self._grammar is not None:
            self._grammar.release()
        num_outputs = min(num_outputs, self._num_pending)
        if num_outputs:
            num_tokens = self._num_pending_tokens * num_outputs // self._num_pending
            self._num_pending -= num_outputs
            self._num_pending_tokens -= num_tokens
            self._share.pending_outputs -= num_outputs
            self._estimator.begin(num_outputs, num_tokens)


class AdmittedCall:
    """Holds an :class:`AdmittedRequest` for one of the calls of a request; only one call at a time holds it.

    A request that runs without a client may be resumed or repeated by another call, which takes the admitted request
    over, and gives it back if it ends while that request still runs. So a request that runs counts for the limits at
    every moment, and counts once.
    """

    def __init__(
        self, admitted: AdmittedRequest, hold: Reservation | None = None, before: "AdmittedCall | None" = None
    ) -> None:
        """``hold``: taken over from ``before``, the call that had it; None: ``admitted`` is new."""
        self.admitted = admitted
        self._hold = Reservation(partial(_close, admitted), 1) if hold is None else hold
        self._before = before
        self._has_ended = False

    @property
    def holds_admission(self) -> bool:
        """Whether this call holds the admitted request, and no other call does."""
        return self._hold.amount > 0

    def succeed(self) -> "AdmittedCall":
        """Return the hold of a call that takes the admitted request over."""
        # Moved, not freed and taken again: a repeat under the same key freed what the request that ran on held, even
        # when the repeat was refused, and a tenant limited to two outputs ran twelve.
        return AdmittedCall(self.admitted, self._hold.move(), self)

    def end(self) -> None:
        """Give the admitted request back to the call that held it before, if its request still runs; otherwise close
        it. A call that does not hold it any more does nothing."""
        self._has_ended = True
        # It stays known: a call that has taken over from this one gives it back past this one.
        before = self._before = self._living_before()
        if before is not None:
            before._hold.absorb(self._hold)
        else:
            self._hold.release()

    def _living_before(self) -> "AdmittedCall | None":
        """Return the latest of the calls before this one whose request still runs."""
        before = self._before
        while before is not None and before._has_ended:
            before = before._before
        return before


def _close(admitted: AdmittedRequest, _: int) -> None:
    """Close what no call holds any more. It is no method, because the hold would then refer to its own call."""
    admitted.close()


def _take_grammar(request: GenerateRequest, share: TenantShare) -> Reservation:
    text = request.sampling.structured_outputs.SerializeToString(deterministic=True)
    return share.take_grammar(hashlib.blake2b(text, digest_size=16).digest())


def _num_at_once(request: GenerateRequest, share: TenantShare, most: int) -> int:
    num_prompts = 1 if isinstance(request.prompts, Chat) else len(request.prompts)
    limit = share.limits.live_outputs
    return min(num_prompts, most if limit is None else max(min(most, limit), 1))


def _num_outputs(request: GenerateRequest) -> int:
    """Return the number of outputs. Checked before anything is allocated for them."""
    num_prompts = 1 if isinstance(request.prompts, Chat) else len(request.prompts)
    if num_prompts > MAX_PROMPTS:
        field = request.prompt_field
        raise errors.InvalidArgument(f"{field} may hold at most {MAX_PROMPTS} prompts, not {num_prompts}", field)
    validation.check_samples(request.num_samples, num_prompts)
    return num_prompts * request.num_samples
