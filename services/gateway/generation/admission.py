"""Admits requests, within the capacity of the mesh and the limits of their tenants."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from tokenloom.request import errors, validation
from tokenloom.request.limits import Reservation

from ..records.generate_request import Chat, GenerateRequest
from ..tenants.tenant_shares import MAX_QUEUE_SECONDS, TenantShare, TenantShares
from .wait_estimator import WaitEstimator, WaitLimit, estimate_prompt_tokens

log = logging.getLogger(__name__)

MAX_PROMPTS = 1024
"""Limit on the prompts of one request."""
LOG_SECONDS: Final = 10.0
"""Refusals for lack of capacity are logged at most once in this time: a line for each costs more than the refusal."""


class RequestAdmission:
    """Admits requests until the gateway drains.

    A request is admitted or refused here and nowhere else, before anything is spent on it: the mesh behind the gateway
    has room for every request that this rule admits.
    """

    def __init__(self, shares: TenantShares, estimator: WaitEstimator, most_urgent_priority: int = 0) -> None:
        """``most_urgent_priority``: the lowest priority that a client gets, whatever it asks for."""
        self._shares = shares
        self._estimator = estimator
        self._refusals = RefusalLog(asyncio.get_running_loop().time)
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

    def admit(self, request: GenerateRequest, timeout: float, *, most_at_once: int = 0) -> "AdmittedRequest":
        """Return the admitted request, which holds its part of the tenant's share until it is closed.

        ``timeout``: seconds that the request may take. ``most_at_once``: outputs that are in work at the same time, for
        a request whose prompts take turns; a tenant with a lower limit has fewer; 0: all.

        Raises ``Unavailable`` while the gateway drains, ``ResourceExhausted`` when the request would wait for too long,
        ``RateLimitExceeded`` when the tenant is at a limit, ``InvalidArgument`` for too many prompts or samples.
        """
        self.check_open()
        share = self._shares.of(request.tenant)
        num_outputs = _num_at_once(request, share, most_at_once) if most_at_once else _num_outputs(request)
        seats = share.take_outputs(num_outputs, self._shares.outputs)
        try:
            # Admitted here and nowhere else: while four parts each limited requests by a count, 2,600 at once were
            # admitted up to 2,048, and none was answered in time.
            self._check_wait(request, share, timeout)
            grammar = _take_grammar(request, share) if request.sampling.HasField("structured_outputs") else None
        except errors.TokenloomError:
            seats.release()
            raise
        self._idle.clear()
        self._num_admitted += 1
        leave = partial(self._leave, num_outputs, is_new=self._num_old is not None)
        num_tokens = estimate_prompt_tokens(request)
        return AdmittedRequest(share, self._estimator, seats, leave, num_tokens=num_tokens, grammar=grammar)

    def check_open(self) -> None:
        """Raise ``Unavailable`` while the gateway drains."""
        if self._draining:
            raise errors.Unavailable("the gateway is shutting down; retry")

    async def drain(self) -> None:
        """Refuse new requests, and return when none is in work."""
        self._draining = True
        await self._idle.wait()

    async def end_of_present(self) -> None:
        """Return when the requests that are in work now have ended; new ones are still admitted. To be called once."""
        self._num_old = self._num_admitted
        if self._num_old:
            await self._old_ended.wait()

    def _leave(self, num_outputs: int, *, is_new: bool) -> None:
        """Subtract a request that has ended. ``is_new``: it came after :meth:`end_of_present`."""
        self._num_admitted -= 1
        if self._num_old and not is_new:
            self._num_old -= 1
            if not self._num_old:
                self._old_ended.set()
        self._estimator.end(num_outputs)
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
            estimator.check(WaitLimit(priority, timeout, queue_share, request.is_sheddable))
        except errors.ResourceExhausted as error:
            if request.is_sheddable:  # it is tried again until there is capacity: no client was refused
                raise
            share.refused[MAX_QUEUE_SECONDS] += 1
            self._refusals.add(error.message)
            raise


class RefusalLog:
    """Counts refused requests between two lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: monotonic seconds."""
        self._clock = clock
        self._logged_at = -LOG_SECONDS
        self._num_refused = 0

    def add(self, message: str) -> None:
        """Count a refusal, and log it with those since the last line if that is old enough."""
        self._num_refused += 1
        now = self._clock()
        if now - self._logged_at >= LOG_SECONDS:
            log.warning("requests refused since the last such line: %d; %s", self._num_refused, message)
            self._logged_at, self._num_refused = now, 0


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
    ) -> None:
        """Args:
        seats: Of its outputs, at the tenant and at the gateway.
        leave: Ends its presence at the mesh.
        num_tokens: An estimate of its prompt tokens.
        grammar: Held until the first token; None: the output follows none.
        """
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
            self._begun.add(index)
            self._end_wait(1)

    def close(self) -> None:
        """Return what the request holds, and charge the tokens that it used. A second call has no effect."""
        if self._is_closed:
            return
        self._is_closed = True
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
