"""Implements grammars with llguidance, which compiles lazily and limits the work of every step.

It has no form of its own for all structural tags, so they are written as grammars.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from ..data.core_params import GrammarKind, StructuredOutput
from .grammar_backend import Bitmask, GrammarError, close_objects

_ANY = r"(.|\n)*"
# llguidance's own form has triggers and tags only. Both backends agree on the texts of the tests (python -m
# tests.engine_core.structured_output.check_xgrammar); what cannot be written is refused by name.
_KEYS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema"}),
    "regex": frozenset({"pattern", "also", "excludes"}),
    "any_text": frozenset(),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
}
"""The formats that can be written, and the members that have an effect."""
_REPEATS = {"optional": "?", "plus": "+", "star": "*"}

_End = Sequence[str] | None
"""The texts of which one follows; [""]: the output ends; None: something else follows."""


def structural_tag_grammar(source: str, special_tokens: Mapping[str, int], json_grammar: Callable[[Any], str]) -> str:
    """Return a tag with a ``format`` as a Lark grammar.

    Args:
        special_tokens: Ids by text of the tokens that free text cannot hold.
        json_grammar: Returns a JSON schema in llguidance's syntax.

    Raises ``GrammarError`` for a format that cannot be written.
    """
    return _Writer(special_tokens, json_grammar).write(json.loads(source)["format"])


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], json_grammar: Callable[[Any], str]) -> None:
        self._special = special_tokens
        self._json_grammar = json_grammar
        texts = sorted(map(re.escape, special_tokens), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(texts)})") if texts else None
        self._rules: list[str] = []

    def write(self, found: Any) -> str:
        start = self._format(found, [""])
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def _format(self, found: Any, end: _End) -> str:
        """Return the expression of a format and of the end after it."""
        if not isinstance(found, dict):
            raise _unsupported("a format that is not an object")
        kind = found.get("type", "tag")
        if kind not in _KEYS:
            raise _unsupported(f"the format {kind}")
        for name, value in found.items():
            if name not in _KEYS[kind] and name != "type" and value not in (None, False, [], "json"):
                raise _unsupported(f"{name} of the format {kind}")
        match kind:
            case "any_text":
                return self._any_text(end)
            case "regex" if found.get("excludes"):
                return self._text_like(found, end)
            case "sequence":
                *before, last = found["elements"]
                return " ".join([*(self._format(each, None) for each in before), self._format(last, end)])
            case "or":
                return _either([self._format(each, end) for each in found["elements"]])
            case "triggered_tags":
                return self._triggered_tags(found, end)
            case _:
                return f"{self._bounded(kind, found)} {self._ends(end)}"

    def _bounded(self, kind: str, found: Any) -> str:
        """Return the expression of a format that does not depend on what follows."""
        match kind:
            case "const_string":
                return self._text(found["value"])
            case "regex":
                return self._rule(self._pattern(found["pattern"]), terminal=True)
            case "json_schema":
                return self._rule(self._json_grammar(found["json_schema"]))
            case "tag":
                return self._tag(found, self._text(_string(found["begin"])))
            case "tags_with_separator":
                return self._separated(found)
        return f"({self._format(found['content'], None)}){_REPEATS[kind]}"

    def _tag(self, tag: Any, begin: str) -> str:
        end = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        return self._rule(f"{begin} {self._format(tag['content'], [*map(_string, end)])}")

    def _separated(self, found: Any) -> str:
        tag = self._rule(_either([self._format(each, []) for each in found["tags"]]))
        more = "" if found.get("stop_after_first") else f" ({self._text(found['separator'])} {tag})*"
        return f"({tag}{more}){'' if found.get('at_least_one') else '?'}"

    def _triggered_tags(self, found: Any, end: _End) -> str:
        """At least one: the text begins with a tag."""
        at_once = _either([self._format(tag, []) for tag in found["tags"]])
        later = self._rule(_either([self._triggered(tag, found["triggers"]) for tag in found["tags"]]))
        if found.get("stop_after_first"):
            ends = self._ends(end)
            if found.get("at_least_one"):
                return f"{at_once} {ends}"
            return _either([self._any_text(end), f"{later} {ends}"])
        first = f"{at_once} " if found.get("at_least_one") else ""
        return f"{first}({later})* {self._any_text(end)}"

    def _triggered(self, tag: Any, triggers: Sequence[str]) -> str:
        """Return text up to a trigger, and the tag from there on."""
        begin = _string(tag["begin"])
        trigger = next(each for each in triggers if begin.startswith(each))
        if trigger in self._special:
            head = f"{self._rule(f'/{_ANY}/', terminal=True)} {self._text(trigger)}"
        elif self._split is not None and self._split.search(trigger):
            raise _unsupported("a trigger that holds a special token and more")
        else:
            head = self._lazy([trigger])
        return self._tag(tag, f"{head} {self._text(begin[len(trigger) :])}")

    def _any_text(self, end: _End) -> str:
        if end is None:
            raise _unsupported("any_text with something behind it that is not the end of its tag")
        if not all(end):
            if any(end):
                raise _unsupported("any_text with an end that may be empty")
            return self._rule(f"/{_ANY}/", terminal=True)
        special = [text for text in end if text in self._special]
        if not special:
            return self._lazy(end)
        if len(special) < len(end):
            raise _unsupported("any_text that ends at a special token or at other text")
        return f"{self._rule(f'/{_ANY}/', terminal=True)} {self._ends(special)}"

    def _text_like(self, found: Any, end: _End) -> str:
        """Return a text up to its end that matches expressions: ``also`` has more than one. ``excludes``: what it does
        not hold."""
        also, excludes = found.get("also") or [], found["excludes"]
        for texts in (also, excludes):
            if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
                raise _unsupported("a regex whose also or excludes is no list of texts")
        if not end or not all(end):
            raise _unsupported("a regex that excludes texts without an end")
        without = [f"~{self._pattern(f'(?s:.*){re.escape(each)}(?s:.*)')}" for each in excludes]
        text = self._rule(" & ".join([*map(self._pattern, (found["pattern"], *also)), *without]), terminal=True)
        if any(each in self._special for each in end):
            return f"{text} {self._ends(end)}"
        # Terminals take as much as they can, also of what ends them; this one takes as little as it can.
        return self._rule(f"{text} ({' | '.join(map(quoted, end))})", attributes="[lazy]")

    def _lazy(self, ends: Sequence[str]) -> str:
        """Return text up to the first of these ends, which are included."""
        return self._rule(f"/{_ANY}/ ({' | '.join(map(quoted, ends))})", attributes="[lazy]")

    def _ends(self, end: _End) -> str:
        return _either([self._text(text) for text in end]) if end and any(end) else ""

    def _text(self, text: str) -> str:
        """Return a text, in which special tokens are named by their ids."""
        parts = self._split.split(text) if self._split is not None else [text]
        written = [f"<[{self._special[part]}]>" if part in self._special else quoted(part) for part in parts if part]
        return " ".join(written) or '""'

    def _pattern(self, pattern: str) -> str:
        escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.S)
        return f"/{escaped.replace(chr(10), chr(92) + 'n')}/"

    def _rule(self, expression: str, *, terminal: bool = False, attributes: str = "") -> str:
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name


def _either(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def quoted(text: str) -> str:
    """Return a text as Lark writes it; it understands the escapes of JSON, and needs one for DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _string(text: Any) -> str:
    if not isinstance(text, str):
        raise _unsupported("a begin or end that names a token")
    return text


def _unsupported(what: str) -> GrammarError:
    return GrammarError(
        f"structural_tag: {what} is not supported by the engine's backend llguidance "
        "(engines take another one with --structured-outputs-backend xgrammar)"
    )


# Twenty characters of indentation are five levels of four. Without a bound, a small model that is caught in blanks
# writes blanks until max_tokens.
_WHITESPACE = r"( |\r?\n[ \t]{0,20})?"
"""Allowed between two JSON tokens: a space, or a new line and its indentation, to prevent loops of blanks."""
_MAX_ERROR_CHARS = 300
_LINES = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?(.*?) \d+ \| .*", re.S)
"""A message about a grammar, with the lines of the grammar that it quotes."""
_MEANINGS = {"NoExtensionBias": "the schema, or a rule, refers to itself without anything that could end it"}
"""What the library's own words mean, where they say nothing to a client."""


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
        try:
            matcher = self._build(grammar)
        except GrammarError as error:
            if constraint.kind is GrammarKind.GRAMMAR:
                raise
            # The client knows its schema or expression, and not the grammar that was written of it.
            raise GrammarError(_LINES.sub(r"\1", str(error))) from None
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
    message = _shorten(matcher.get_error())
    return GrammarError(_MEANINGS.get(message, message))


def _shorten(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_ERROR_CHARS]
