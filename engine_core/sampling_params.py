"""How the next token is chosen, as the engine sees it: every default filled in, every value already validated."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Resolved sampling parameters of one request (meanings and defaults as in vLLM).

    A token is a function of (logits, these parameters, ``seed``, output index) and of nothing else.
    """

    max_tokens: int
    """Output tokens at most, those of earlier attempts included."""
    seed: int
    """Unsigned 64-bit key of the counter-based random numbers; drawn at the edge when the client sets none."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, end-of-sequence ids included unless the client ignores them."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
