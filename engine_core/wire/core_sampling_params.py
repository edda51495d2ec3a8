"""How the next token is chosen, as the engine sees it: every default filled in, every value already validated."""

import enum

import msgspec


class GrammarKind(enum.StrEnum):
    """What a constraint on the output is written in."""

    JSON = "json"
    """A JSON schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object; without a source."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """A context-free grammar in EBNF."""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the output must be."""

    kind: GrammarKind
    source: str = ""


class RepetitionDetection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output is cut when it ends with one pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens repeated
    ``min_count`` times (names as in vLLM)."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


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
    min_tokens: int = 0
    """Output tokens before which none of ``stop_token_ids`` may come, those of earlier attempts included."""
    logprobs: int | None = None
    """How many of the best tokens to tell beside the one taken; None: no log probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    logprob_token_ids: tuple[int, ...] = ()
    """With ``logprobs``: tokens to tell whatever their rank."""
    logit_bias: dict[int, float] = {}
    """What is added to a token's logit."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output."""
    repetition_detection: RepetitionDetection | None = None
    structured_output: StructuredOutput | None = None
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, whatever is cached of it."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
