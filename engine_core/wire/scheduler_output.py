"""What the scheduler tells the worker each step, and what comes back. Differences only: the worker keeps the rest."""

import msgspec
import numpy as np
import numpy.typing as npt

from .core_sampling_params import SamplingParams
from .embedding_rows import EmbedsSpan
from .messages import Logprobs


class NewRequestData(msgspec.Struct, array_like=True, gc=False):
    """A request the worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Accepted tokens of earlier attempts."""
    sampling_params: SamplingParams
    block_ids: list[int]
    """Its whole block table so far."""
    num_computed_tokens: int
    prompt_embeds: list[EmbedsSpan] = []
    """Kept by the worker for the life of the request."""


class CachedRequestData(msgspec.Struct, array_like=True, gc=False):
    """Requests the worker knows, in parallel columns."""

    req_ids: list[str]
    new_block_ids: list[list[int]]
    """[n] appended to the block table; of a resumed request, its whole new block table."""
    num_computed_tokens: list[int]
    resumed_token_ids: dict[str, list[int]]
    """Requests back from a preemption, with prompt and output token ids: their rows are built anew."""


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's work."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Tokens to compute, for every request of the step."""
    total_num_scheduled_tokens: int
    finished_req_ids: list[str]
    """Ended since the last step: the worker forgets them."""
    preempted_req_ids: list[str]
    """Lost their blocks in this step: the worker forgets their rows."""

    def num_computed_tokens(self) -> dict[str, int]:
        """Return, for every request of the step, how many of its tokens were computed before it."""
        cached = self.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in self.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed


class GrammarOutput(msgspec.Struct, array_like=True, gc=False):
    """Which tokens grammars allow in a step, of the requests that have one and draw a token."""

    req_ids: list[str]
    bitmask: npt.NDArray[np.int32]
    """[n, ceil(vocab_size / 32)]: bit i of word w stands for token 32 * w + i; set: allowed. It must not change before
    the step's tokens are drawn."""

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[n, vocab_size] whether each token may be drawn."""
        bits = np.unpackbits(self.bitmask.view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return bits.astype(np.bool_)


class ModelRunnerOutput(msgspec.Struct, array_like=True, gc=False):
    """What the worker computed."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """[n] parallel to ``req_ids``; empty for a request whose prompt is not complete yet."""
    logprobs: dict[str, Logprobs] = {}
    """Of the sampled tokens, of the requests that ask."""
    prompt_logprobs: dict[str, Logprobs] = {}
    """Of the prompt tokens that this step computed the logits of, of the requests that ask, in order."""
    num_nans_in_logits: dict[str, int] = {}
    """Of the requests whose row had any, if they are counted."""
    without_choice: list[str] = []
    """Requests that are to draw a token, and whose masks leave none; in ``sampled_token_ids`` they have none."""
