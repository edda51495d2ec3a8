"""How many tokens a step computes, and how many of them one request gets."""

from collections.abc import Iterable

from .config import SchedulerConfig
from .request import Request


class TokenBudget:
    """The limits of a step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_tokens = config.max_num_batched_tokens
        self._decode_tokens = config.decode_batched_tokens if config.enable_chunked_prefill else None
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens

    def of_step(self, running: list[Request]) -> int:
        """Smaller while anything decodes, so that a long prompt does not hold up everybody's next token."""
        if self._decode_tokens is None or not _is_decoding(running):
            return self._max_tokens
        return min(self._max_tokens, max(self._decode_tokens, len(running)))

    def chunk(self, request: Request, num_left: int) -> int:
        """Tokens of a request to compute in a step with room for ``num_left`` more."""
        return min(_num_missing(request), num_left, self._max_chunk)


def _is_decoding(running: Iterable[Request]) -> bool:
    # Few can have more than their next token left, so this looks at one request, two at most.
    return any(_num_missing(request) == 1 for request in running)


def _num_missing(request: Request) -> int:
    """Tokens that are not scheduled yet: known ones, and ones that the worker draws by then."""
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
