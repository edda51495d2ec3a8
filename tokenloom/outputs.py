"""What the offline API returns, with vLLM's names."""

from dataclasses import dataclass


@dataclass
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Among the outputs of its request."""
    text: str
    token_ids: list[int]
    """The token that ended the output included."""
    cumulative_logprob: float | None = None
    """Always None: log probabilities are not supported yet."""
    logprobs: None = None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``."""
    stop_reason: int | str | None = None
    """The stop string, or the token of ``stop_token_ids``; None for the model's own end-of-sequence tokens."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """One prompt and its outputs."""

    request_id: str
    prompt: str | None
    """None for a prompt given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: None = None
