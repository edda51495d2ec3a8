"""Decides how many prompt tokens a step may compute while other requests decode."""

# A fixed 128 tokens a step made a burst of 32 prompts of 128 tokens take some 40 slow steps and its last first token 8
# s instead of 4; no limit made the p99 between tokens 2.8 s instead of 0.6. Beside one or two requests, chunks of 128
# cost a prompt of 900 tokens 20 ms of its first token and helped the others little.
_DELAY = 0.06
"""Seconds by which a step's prompt tokens may delay the next tokens of all decoding requests together."""
# With 64 prompts of 900 tokens at once and equal weights the engine made 1.17 times vLLM's requests a second; with 2 it
# makes 1.2 times, and the p99 between tokens of 32 streams stays at 24 ms.
_BEHIND = 2
"""How many requests that decode weigh as much, against this delay, as a prompt that waits behind another one."""
# A step of qwen3-0.6b with 128 prompt tokens beside 32 streams took twice the time of one without a prompt, and three
# times during a burst.
_PAUSE = 0.08
"""Seconds by which they may delay each of these tokens, however many requests decode. A slow model computes half of
the least number of tokens all the same: fewer would cost more than they save."""
_WEIGHT = 1 / 8


# Against 128 tokens for each prompt that waits (tiny-fp32, two cores, 192 prompts in 32 streams): p99 between tokens 25
# ms instead of 67, median time to the first token 48 ms instead of 206, 0.91 of the tokens/s.
class PromptShare:
    """Learns how fast prompts are computed, so that a fast model computes a prompt beside few others in few chunks, and
    the chunks of a slow one stay short."""

    def __init__(self, least: int) -> None:
        """``least``: prompt tokens that a step may compute, half as many on a slow model."""
        self._least = least
        self._rate = 0.0  # tokens a second, of steps whose time their tokens make

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that has ended. Steps of fewer tokens than ``least`` take the time of reading weights."""
        # A decode step of few rows takes the time of reading the weights, so its rate would say that prompts are slow.
        if num_tokens >= self._least and seconds > 0:
            rate = num_tokens / seconds
            self._rate += _WEIGHT * (rate - self._rate) if self._rate else rate

    def num_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """Return the prompt tokens of a step beside ``num_decoding`` requests (at least 1) while ``num_prompts`` wait.

        Each token delays the requests that decode and brings the prompts that wait forward. Where these outweigh the
        others n times, the step may compute n times as many tokens.
        """
        within_delay = int(self._rate * _DELAY / num_decoding)
        return max(
            self._least_tokens() * max(num_decoding, num_prompts) // num_decoding,
            within_delay * max(num_decoding, 1 + _BEHIND * (num_prompts - 1)) // num_decoding,
        )

    def _least_tokens(self) -> int:
        if not self._rate:
            return self._least
        return max(-(-self._least // 2), min(self._least, int(self._rate * _PAUSE)))
