"""Defines the sampling parameters as the engine receives them: checked, with every default filled in."""

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


DRAWS_NOTHING = CoreSamplingParams(max_tokens=1, seed=0)
"""The parameters of requests that are pooled. The token that they allow stands for the result."""
