"""Writes structural tags as grammars of llguidance, which has no form of its own for all of them.

The meaning is xgrammar's: free text may hold anything but a trigger, a tag that is triggered must be completed, and
text without a limit ends where its tag's end begins.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .grammar_backend import GrammarError

_ANY = r"(.|\n)*"
# llguidance's own form knows triggers and tags only. Both backends agree on the texts of the tests (python -m
# tests.engine_core.structured_output.check_xgrammar); what cannot be written is refused by name.
_KEYS: Mapping[str, frozenset[str]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema"}),
    "regex": frozenset({"pattern"}),
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
            raise _unsupported("any_text whose ends are special tokens and others")
        return f"{self._rule(f'/{_ANY}/', terminal=True)} {self._ends(special)}"

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
