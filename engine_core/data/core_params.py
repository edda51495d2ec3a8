"""Defines the parameters of requests as the engine receives them: of sampling, checked and with every default filled
in, and of pooling, with what a model can pool."""

import enum

import msgspec

from tokenloom.request.sampling_params import SamplingFields


class GrammarKind(enum.StrEnum):
    """Names the language of a constraint on the output."""

    JSON = "json"
    """A JSON schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object; it has no source."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of texts."""
    GRAMMAR = "grammar"
    """A context-free grammar in EBNF."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON of a structural tag: an object with a ``format``, as xgrammar defines them."""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A constraint on the output."""

    kind: GrammarKind
    source: str = ""
    whitespace_pattern: str | None = None
    """With JSON: a regular expression for what may stand between two tokens; None: the backend's own."""
    disable_any_whitespace: bool = False
    """With JSON: nothing may stand between two tokens."""


class TimestampRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Lets moments of time stand in a transcript as in ``types.proto``."""

    first_token_id: int
    no_timestamps_token_id: int
    num_text_ids: int
    max_initial_index: int | None = None


class TranscriptRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Says which tokens may stand in a transcript, as in ``types.proto``."""

    suppressed_token_ids: tuple[int, ...] = ()
    begin_suppressed_token_ids: tuple[int, ...] = ()
    timestamps: TimestampRules | None = None


class CoreSamplingParams(SamplingFields, frozen=True, omit_defaults=True, gc=False, kw_only=True):  # type: ignore[misc]
    """Resolved sampling parameters of one request: most are rows of the table, and these are what the engine adds or
    receives in another form. (The rows may be changed where callers make them, but not here, hence the ignored rule.)

    A token is a function of (logits, these parameters, ``seed``, output index) and of nothing else.
    """

    max_tokens: int
    """Limit of output tokens, those of earlier attempts included."""
    seed: int
    """Unsigned 64-bit key of the counter-based random numbers; drawn at the edge if the client sets none."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output."""
    structured_output: StructuredOutput | None = None
    transcript: TranscriptRules | None = None
    """What may stand in a transcript; None: anything."""


DRAWS_NOTHING = CoreSamplingParams(max_tokens=1, seed=0)
"""The parameters of requests that are pooled. The token that they allow stands for the result."""


class PoolingTask(enum.IntEnum):
    """Names what a pooling request returns (numbers as in ``types.proto``, names in lower case as in vLLM)."""

    EMBED = 1
    """One vector for the prompt."""
    CLASSIFY = 2
    """One probability for each class of the model's head."""
    SCORE = 3
    """One number: the relevance of a document to a query, by a model that reads both at once."""
    TOKEN_EMBED = 4
    """One vector for each token of the prompt."""
    TOKEN_CLASSIFY = 5
    """The probabilities of the classes for each token of the prompt."""
    ALIGN = 6
    """For each token of the prompt, the row of the sound beside it at which the token is spoken."""

    @property
    def is_by_token(self) -> bool:
        """Whether the result has a row for each token."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


class LateInteraction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scores documents against the token vectors of a query, which the engine core keeps."""

    query_id: str
    num_documents: int = 0
    """With the query itself: how many documents follow it. 0: this request is a document."""


class CorePoolingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Controls what is computed from a prompt instead of generating tokens."""

    task: PoolingTask
    dimensions: int | None = None
    """How many of the first numbers of each vector to keep (Matryoshka); None: all."""
    use_activation: bool | None = None
    """Whether vectors are normalized to length 1, and logits become probabilities; None: as the model says."""
    first_part_tokens: int = 0
    """Tokens of the prompt's first part, which have token type 0, and those after it 1; 0: all have type 0."""
    skipped_tokens: int = 0
    """So many tokens at the begin of the prompt take no part in the vector of the prompt, or in the alignment."""
    late_interaction: LateInteraction | None = None
    """Only with ``TOKEN_EMBED``: the vectors stay in the core."""
    aligned_rows: int = 0
    """With ``ALIGN``: rows of the sound in which something may be spoken; 0: all."""


class ModelPooling(msgspec.Struct, frozen=True):
    """Describes what a model can pool."""

    tasks: tuple[PoolingTask, ...] = ()
    whole_prompt: frozenset[PoolingTask] = frozenset()
    """Tasks that read the hidden states of all tokens of the prompt, so that none may come from the prefix cache."""
    generates: bool = True
    """Whether the model generates tokens."""
    is_encoder: bool = False
    """Whether each token attends to all tokens of the prompt: a step computes whole prompts, and no KV is kept."""
    matryoshka: bool = False
    """Whether requests may set ``dimensions``."""
    dimensions: tuple[int, ...] = ()
    """The values that they may have; empty: any up to ``vector_size``."""
    vector_size: int = 0
    """Numbers of a vector."""
    class_labels: tuple[str, ...] = ()
    """The names of the classes, in order; empty if the checkpoint does not name them."""
    text_rules: str = ""
    """How texts become tokens for vectors, as the checkpoint's files say; empty: they say nothing. The tokenizer keeps
    to it while the engine runs."""
