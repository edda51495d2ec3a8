"""Changes logits and samples from them on the host, with PyTorch: processors change the logits, then one rule draws."""

from .allowed_tokens import AllowedTokens
from .bad_words import BadWords
from .logit_bias import LogitBias
from .logits_processor import LogitsProcessor, LogitsProcessors
from .logprobs import LogprobRows
from .min_tokens import MinTokens
from .penalties import Penalties
from .philox import Purpose, uniform
from .sampler import NO_TOKEN, Sampler
from .seen_tokens import SeenTokens

__all__ = [
    "NO_TOKEN",
    "LogitsProcessor",
    "LogitsProcessors",
    "LogprobRows",
    "Purpose",
    "Sampler",
    "SeenTokens",
    "make_logits_processors",
    "uniform",
]


def make_logits_processors() -> LogitsProcessors:
    """All kinds of processors, in vLLM V1's order."""
    return LogitsProcessors([AllowedTokens(), BadWords(), MinTokens(), LogitBias(), Penalties()])
