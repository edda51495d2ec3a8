"""Counts drafts, those of one request and those of all, and decides from a request's last ones whether it gets more."""

import msgspec


class DraftCounts(msgspec.Struct, array_like=True, gc=False):
    """Counts drafts that steps verified (names as in vLLM)."""

    num_drafts: int = 0
    """Times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that equalled the tokens sampled at their positions."""

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Count the drafts of a request in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted


class SpecDecodingStats(DraftCounts):
    """Counts the drafts of all requests, over the life of the core."""

    num_accepted_tokens_per_pos: list[int] = []
    """[num_speculative_tokens] accepted drafts by their position in the step."""


WINDOW = 32
"""Drafts of a request that decide whether it gets further ones."""
# At one right draft of four a step yields a third more tokens; below that, rows that are thrown away cost more. Bits
# and not times decide, so a run can be repeated.
MIN_RIGHT = WINDOW // 4
PROBE_TOKENS = 64
"""Output tokens after which a request whose drafts were wrong gets some again."""


class DraftHistory:
    """Remembers which of a request's last drafts were right. Drafts after a wrong one do not count: no token was
    sampled at their positions."""

    __slots__ = ("_count", "_is_probe", "_paused_until", "_right", "counts")

    def __init__(self) -> None:
        self._right = 0  # a bit for each draft, the last one lowest
        self._count = 0
        self._is_probe = False
        self._paused_until = 0
        self.counts = DraftCounts()
        """All drafts so far."""

    def allows(self, num_tokens: int) -> bool:
        """Return whether a request with ``num_tokens`` tokens gets drafts."""
        return num_tokens >= self._paused_until

    def add(self, num_drafts: int, num_right: int, num_tokens: int) -> None:
        """Count the drafts of a step, the first ``num_right`` of which were right; ``num_tokens``: after the step."""
        self.counts.count(num_drafts, num_right)
        # The first wrong draft is judged, those behind it are not: they continued a text that was never sampled.
        num_judged = min(num_drafts, num_right + 1)
        bits = ((1 << num_right) - 1) << (num_judged - num_right)
        self._right = (self._right << num_judged | bits) & ((1 << WINDOW) - 1)
        self._count += num_judged
        if self._is_probe:
            is_poor = num_right * WINDOW < num_judged * MIN_RIGHT
        else:
            is_poor = self._count >= WINDOW and self._right.bit_count() < MIN_RIGHT
        self._is_probe = is_poor
        if is_poor:
            self._paused_until = num_tokens + PROBE_TOKENS
            self._right = self._count = 0
