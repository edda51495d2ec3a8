"""Decides how many prompt tokens a step may compute while other requests decode."""

_DELAY = 0.06
"""Seconds by which a step's prompt tokens may delay the next tokens of all decoding requests together."""
_BEHIND = 2
"""How many requests that decode weigh as much as a prompt that waits behind another one."""
_WEIGHT = 1 / 8


class PromptShare:
    """Learns how fast prompts are computed, so that a fast model computes a prompt beside few others in few chunks."""

    def __init__(self, least: int) -> None:
        """``least``: prompt tokens that a step may compute however slow the model is."""
        self._least = least
        self._rate = 0.0  # tokens a second, of steps whose time their tokens make

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended. Steps of fewer tokens than ``least`` take the time of reading weights."""
        if num_tokens >= self._least and seconds > 0:
            rate = num_tokens / seconds
            self._rate += _WEIGHT * (rate - self._rate) if self._rate else rate

    def num_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Return the prompt tokens of a step beside ``num_decoding`` requests (at least 1) while ``num_prompts`` wait.

        Each token delays the requests that decode and brings the prompts that wait forward. Where these outweigh the
        others n times, the step may compute n times as many tokens.
        """
        beside = max(self._least, int(self._rate * _DELAY / num_decoding))
        return beside * max(num_decoding, 1 + _BEHIND * (num_prompts - 1)) // num_decoding
