"""Implements grammars with llguidance, which compiles lazily and limits the work of every step."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from ..data.core_sampling_params import GrammarKind, StructuredOutput
from .grammar_backend import Bitmask, GrammarError
from .json_schema import close_objects
from .structural_tag_lark import quoted, structural_tag_grammar

# Twenty characters of indentation are five levels of four. Without a bound, a small model that is caught in blanks
# writes blanks until max_tokens.
_WHITESPACE = r"( |\r?\n[ \t]{0,20})?"
"""Allowed between two JSON tokens: a space, or a new line and its indentation, to prevent loops of blanks."""
_MAX_ERROR_CHARS = 300


class LLGuidanceBackend:
    """Implements ``StructuredOutputBackend``."""

    COMPILE_BYTES = 64 << 20

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        disable_any_whitespace: bool = False,
    ) -> None:
        """Load the tokenizer of a model with ``vocab_size`` logits.

        ``disable_any_whitespace``: nothing may stand between two tokens of JSON, whatever a request asks for.
        Raises ``ValueError`` if llguidance cannot derive the bytes of its tokens.
        """
        self._tokenizer_file = tokenizer_file
        self._disable_any_whitespace = disable_any_whitespace
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer = llguidance.LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=eos or None)
        self.eos_token_ids = tuple(self._tokenizer.eos_tokens)
        # The library's defaults limit each step; its limit for a row is too low for many optional properties.
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=10_000, max_lexer_states=100_000, verbose_errors=False
        )

    def prepare(self, constraint: StructuredOutput) -> str:
        """Return llguidance's form of the grammar, after building it once and computing a bitmask."""
        grammar = self._grammar(constraint)
        matcher = self._build(grammar)
        # The library compiles lazily: only the first mask shows a grammar that would be too expensive in a step.
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _error(matcher)
        return grammar

    def load(self, prepared: str) -> "_Compiled":
        return _Compiled(self._build(prepared))

    def _grammar(self, constraint: StructuredOutput) -> str:
        """Return a constraint in llguidance's form."""
        match constraint.kind:
            case GrammarKind.JSON:
                return _json_grammar(constraint.source, self._whitespace(constraint))
            case GrammarKind.JSON_OBJECT:
                return _json_grammar('{"type": "object"}', self._whitespace(constraint))
            case GrammarKind.STRUCTURAL_TAG:
                return llguidance.LLMatcher.grammar_from_lark(
                    structural_tag_grammar(constraint.source, self._special_tokens, _embedded_json)
                )
        return _text_grammar(constraint.kind, constraint.source)

    def _whitespace(self, constraint: StructuredOutput) -> str:
        """Return a regular expression for what may stand between two tokens of JSON."""
        if self._disable_any_whitespace or constraint.disable_any_whitespace:
            return ""
        return _WHITESPACE if constraint.whitespace_pattern is None else constraint.whitespace_pattern

    @cached_property
    def _special_tokens(self) -> Mapping[str, int]:
        """The tokens that are no text to llguidance: those in angle brackets too, such as ``<tool_call>``, whatever the
        tokenizer's file calls them."""
        added = json.loads(self._tokenizer_file.read_text()).get("added_tokens", ())
        return {token["content"]: token["id"] for token in added if self._tokenizer.is_special_token(token["id"])}

    def _build(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _error(matcher)
        return matcher


class _Compiled:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> "_Grammar":
        return _Grammar(self._matcher.deep_copy())


class _Grammar:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError("a token does not follow the grammar")

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def rollback(self, num_tokens: int) -> None:
        if not self._matcher.rollback(num_tokens):
            raise _error(self._matcher)

    def reset(self) -> None:
        self._matcher.reset()

    def is_terminated(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill_bitmask(self, row: Bitmask) -> None:
        assert row.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise _error(self._matcher)


def _text_grammar(kind: GrammarKind, source: str) -> str:
    compiler = llguidance.LLMatcher
    if kind is GrammarKind.REGEX:
        return compiler.grammar_from_regex(source)
    if kind is GrammarKind.CHOICE:
        return compiler.grammar_from_lark(f"start: {' | '.join(map(quoted, json.loads(source)))}")
    return compiler.grammar_from_lark(source if is_lark_syntax(source) else _lark_of_gbnf(source))


def _embedded_json(schema: Any) -> str:
    """Return a JSON schema within a Lark grammar."""
    closed = json.loads(close_objects(json.dumps(schema))) if isinstance(schema, dict) else {}
    return f"%json {json.dumps({**closed, 'x-guidance': {'whitespace_pattern': _WHITESPACE}})}"


def _json_grammar(schema: str, whitespace: str) -> str:
    try:
        # A schema with parts that the library does not know is refused and not partly ignored: an output that may break
        # its schema is worse than none.
        return llguidance.LLMatcher.grammar_from_json_schema(
            close_objects(schema), defaults={"whitespace_pattern": whitespace}
        )
    except ValueError as error:
        raise GrammarError(_shorten(str(error))) from None


def _lark_of_gbnf(source: str) -> str:
    try:
        return gbnf_to_lark(source)
    except GbnfToLarkError as error:
        raise GrammarError(_shorten(str(error))) from None
    except Exception as error:  # the converter raises various errors for text that is not EBNF
        raise GrammarError(
            "the grammar is neither EBNF (root ::= ...) nor Lark (start: ...): "
            + (_shorten(str(error)) or type(error).__name__)
        ) from None


def _error(matcher: llguidance.LLMatcher) -> GrammarError:
    return GrammarError(_shorten(matcher.get_error()))


def _shorten(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_ERROR_CHARS]
