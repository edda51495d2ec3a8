"""Checks jobs for a beam search."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenloom.request import validation
from tokenloom.request.beam_search import MAX_LENGTH_PENALTY, num_candidates
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2

from ..records.generate_request import BeamOptions, GenerateRequest

_WITHOUT_EFFECT = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Nothing is drawn."""
_USED = frozenset({"max_tokens", "stop_token_ids", "logprobs", "skip_reading_prefix_cache"})
_NEUTRAL: Mapping[str, object] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}


@dataclass(frozen=True, slots=True)
class BeamPlan:
    """Says how the beams of a request continue."""

    length_penalty: float
    num_candidates: int
    """Next tokens that are considered after each beam."""


def plan_beams(job: GenerateRequest, options: BeamOptions, limits: types_pb2.ModelLimits) -> BeamPlan:
    """Return how to search. Raises ``InvalidArgument`` for what a beam search does not support, naming the field."""
    for descriptor, value in job.sampling.ListFields():
        name = descriptor.name
        if name not in _USED | _WITHOUT_EFFECT and value != _NEUTRAL.get(name):
            raise InvalidArgument(f"{name} is not available with beam search", name)
    has_no_spaces = job.text.HasField("spaces_between_special_tokens") and not job.text.spaces_between_special_tokens
    for name, is_set in (
        ("stop", bool(job.text.stop)),
        ("bad_words", bool(job.bad_words)),
        ("spaces_between_special_tokens", has_no_spaces),
    ):
        if is_set:
            raise InvalidArgument(f"{name} is not available with beam search", name)
    if not -MAX_LENGTH_PENALTY <= options.length_penalty <= MAX_LENGTH_PENALTY:  # NaN fails every comparison
        raise InvalidArgument(
            f"length_penalty must be a number from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}", "length_penalty"
        )
    top = num_candidates(
        job.num_samples,
        vocab_size=limits.vocab_size,
        max_logprobs=validation.max_logprobs(limits),
        field="n",
    )
    return BeamPlan(options.length_penalty, top)
