"""Estimates how long a new request would wait for its first token, and decides whether it is admitted. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import Final

from tokenloom.request.errors import ResourceExhausted

from ..mesh.mesh_view import Capacity
from ..records.generate_request import Chat, EmbeddedPrompt, GenerateRequest
from ..settings.gateway_settings import ALWAYS_QUEUED

UNMEASURED_WAITING: Final = 256
"""Requests that may wait before any rate was measured, if not more of them run: few enough to be answered by any
engine, and more than a mesh without load ever refuses."""
SPARE_SEATS: Final = 0.75
"""Part of the engines' seats that may be taken when a sheddable request begins: it cannot be moved away under the
policy fcfs, so seats stay free for requests that come later."""
SPARE_SECONDS: Final = 0.25
"""How long a sheddable request may wait: longer, and requests that come later would wait behind it."""
BYTES_PER_TOKEN: Final = 4
"""A usual length of a token. A text is counted by its bytes until it has been encoded."""
_EMBEDDING_BYTES: Final = 4096
"""Bytes of a prompt embedding per token, for the same purpose."""


@dataclass(frozen=True, slots=True)
class WaitLimit:
    """Describes how long a request may wait.

    Attributes:
        priority: Lower values are more urgent; 0 is the default.
        timeout: Seconds that the whole request may take.
        queue_share: The part of the queue that runs before the request, 0 to 1: engines take the tenants' requests in
            turn, so a tenant with few requests does not wait for all requests of another one.
        is_sheddable: Whether it may run only with capacity that no other request needs.
    """

    priority: int
    timeout: float
    queue_share: float = 1.0
    is_sheddable: bool = False


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
        self._always_queued = always_queued
        self._draw = draw or SystemRandom()
        self._capacity = Capacity()
        self._other_live = self._other_tokens = 0
        self.live = 0
        """Outputs of this gateway in work."""
        self.pending = 0
        """Outputs among them that have no first token yet."""
        self.pending_tokens = 0
        """Prompt tokens of those; each prompt counts once."""

    def observe(self, capacity: Capacity) -> None:
        """Take the capacity and the load of a new snapshot."""
        self._capacity = capacity
        # Own requests are counted exactly and at once. Read from the snapshot, which is up to 0.2 s old, a burst would
        # be admitted as a whole before the first of it shows there.
        self._other_live = max(capacity.live - self.live, 0)
        self._other_tokens = max(capacity.waiting_tokens - self.pending_tokens, 0)

    def wait_seconds(self) -> float:
        """Return how long a request that came now would wait. It is 0 while the capacity is not known."""
        capacity = self._capacity
        if not capacity.seats:
            return 0.0
        for_compute = for_seat = 0.0
        if capacity.prefill_tokens_per_second:
            for_compute = (self.pending_tokens + self._other_tokens) / capacity.prefill_tokens_per_second
        num_before = self.live + self._other_live + 1 - capacity.seats
        if num_before > 0:
            # A mesh that has just started has no rates yet. Taking its seats for all that it can start in the allowed
            # time, it refused its first small queue.
            is_unknown = not (capacity.starts_per_second or capacity.prefill_tokens_per_second)
            unmeasured = max(capacity.seats, UNMEASURED_WAITING) / self._max_seconds
            starts = unmeasured if is_unknown else capacity.starts_per_second
            for_seat = num_before / starts if starts else 0.0
        # The longer, not the sum: prompts before a request are computed while it waits for a seat.
        return max(for_compute, for_seat)

    def check(self, limit: WaitLimit) -> None:
        """Raise ``ResourceExhausted``, with the time after which a retry may succeed, if the request would wait for too
        long: longer than its priority permits, or than it may take at all."""
        if limit.is_sheddable:
            self._check_spare()
            return
        if self.pending * limit.queue_share < self._always_queued:
            return
        wait = self.wait_seconds() * limit.queue_share
        allowed = min(self._allowed_seconds(limit.priority), limit.timeout)
        if wait <= allowed:
            return
        # Spread, so that clients that were refused in one burst do not come back in one.
        retry_after = max(wait, 1.0) * self._draw.uniform(0.5, 1.5)
        raise ResourceExhausted(
            f"The model is at capacity: the request would wait about {wait:.3g} s for its first token, and it may wait "
            f"{allowed:.3g} s; retry later.",
            retry_after=retry_after,
        )

    def _check_spare(self) -> None:
        """Raise ``ResourceExhausted`` unless a request could begin at once, and would leave seats for others."""
        seats, num_live = self._capacity.seats, self.live + self._other_live
        has_seat = not seats or num_live + 1 <= max(seats * SPARE_SEATS, 1)
        if has_seat and self.wait_seconds() <= SPARE_SECONDS:
            return
        retry_after = self._draw.uniform(0.5, 1.5)
        raise ResourceExhausted("The model is busy with more important requests; retry later.", retry_after=retry_after)

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
    return len(request.before) + sum(map(_estimate, request.prompts))


def _estimate(prompt: str | Sequence[object] | EmbeddedPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, EmbeddedPrompt):
        return sum(len(part) // _EMBEDDING_BYTES if isinstance(part, bytes) else len(part) for part in prompt.parts)
    return len(prompt)
