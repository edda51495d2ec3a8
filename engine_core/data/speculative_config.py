"""Configures speculative decoding."""

from typing import Annotated, Literal

from msgspec import Meta, Struct


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drafted that one step of the model verifies. Users write it as JSON (names as in vLLM)."""

    method: Literal["ngram", "draft_model", "eagle"]
    """ngram: tokens that followed the same tokens earlier in the prompt or output; draft_model: a small model of the
    same vocabulary; eagle: a head on the model's hidden states."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 6
    """Most drafts of a request in a step."""
    model: str = ""
    """Checkpoint directory or hub id of the draft model or head; not for ngram."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 5
    """ngram: the longest sequence that is looked up."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    """ngram: the shortest one."""
    rejection_sample_method: Literal["strict", "probabilistic"] = "strict"
    """strict: a draft counts if it equals the token drawn at its position, so no token changes; probabilistic:
    rejection sampling, which keeps the distribution but not the tokens."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for settings that contradict each other."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max is {self.prompt_lookup_max}; the "
                "first must not be above the second"
            )
        if self.method == "ngram" and self.model:
            raise ValueError("model: the method ngram has no model; use draft_model or eagle")
        if self.method != "ngram" and not self.model:
            raise ValueError(f"model: the method {self.method} needs the checkpoint that drafts")
