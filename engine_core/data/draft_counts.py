"""Counts drafts: those of one request, and those of all."""

import msgspec


class DraftCounts(msgspec.Struct, array_like=True, gc=False):
    """Counts drafts that steps verified (names as in vLLM)."""

    num_drafts: int = 0
    """Times that a request had drafts in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that equalled the tokens drawn at their positions."""

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Count the drafts of a request in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted


class SpecDecodingStats(DraftCounts):
    """Counts the drafts of all requests, over the life of the core."""

    num_accepted_tokens_per_pos: list[int] = []
    """[num_speculative_tokens] accepted drafts by their position in the step."""
