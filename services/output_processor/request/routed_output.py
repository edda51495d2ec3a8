"""Collects which experts computed the tokens of one sample, from all its attempts. No I/O."""

from tokenloom.request.routed_rows import RoutedRows, routed_message
from tokenloom.v1.types_pb2 import RoutedExperts, SamplingParams


class RoutedOutput:
    """Joins what the attempts of a sample report. Does nothing for a sample that does not ask for its experts."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, sample_index: int) -> None:
        start = params.routed_experts_prompt_start
        # The first sample reports the prompt, whose experts are the same for all.
        self._first = start if sample_index == 0 else max(start, num_prompt_tokens)
        self._rows = RoutedRows(self._first) if params.return_routed_experts else None
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def next_start(self) -> int:
        """Return the position from which on the next attempt has to report experts; 0 if none are asked for."""
        return 0 if self._rows is None else self._rows.end

    def add(self, part: RoutedExperts, num_output_tokens: int) -> None:
        """Add what an attempt reports, when the output has so many tokens."""
        if self._rows is not None:
            self._rows.add(part, self._num_prompt_tokens + num_output_tokens)

    def message(self, num_output_tokens: int) -> RoutedExperts | None:
        """Return the experts of an output that has ended; None if none are asked for or some are missing."""
        if self._rows is None:
            return None
        end = self._num_prompt_tokens + num_output_tokens - 1
        self._rows.cut(end)
        is_complete = self._rows.start == self._first and self._rows.end == end > self._first
        return routed_message(self._rows) if is_complete else None
