"""How many tokens a step computes, and how many of them one request gets."""

from ..config import SchedulerConfig
from .request import Request


class TokenBudget:
    """The limits of a step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.max_num_batched_tokens
        self._max_rows = config.max_num_seqs
        self._beside_decode = config.prefill_tokens_beside_decode if config.enable_chunked_prefill else None
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def of_step(self, running: list[Request], num_waiting: int) -> int:
        """Smaller while anything decodes: each prompt token holds up everybody's next token.

        It brings forward all whose prompts wait, so it grows with them: one long prompt comes in small chunks, a burst
        of prompts at once.
        """
        if self._beside_decode is None:
            return self._max_tokens
        num_prompts = _num_begun_prompts(running)
        num_decoding = len(running) - num_prompts
        if not num_decoding:
            return self._max_tokens
        num_prompts += min(num_waiting, self._max_rows - len(running))
        return min(self._max_tokens, num_decoding + self._beside_decode * max(1, num_prompts))

    def chunk(self, request: Request, num_left: int) -> int:
        """Tokens of a request to compute in a step with room for ``num_left`` more."""
        num_missing = _num_missing(request)
        return 1 if num_missing == 1 else min(num_missing, num_left, self._max_chunk)


def _num_begun_prompts(running: list[Request]) -> int:
    """Requests that were not computed to their end: the last ones, or a few among others when priorities differ."""
    num_prompts = 0
    for request in reversed(running):
        if _num_missing(request) <= 1:
            break
        num_prompts += 1
    return num_prompts


def _num_missing(request: Request) -> int:
    """Tokens that are not scheduled yet: known ones, and ones that the worker draws by then."""
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
