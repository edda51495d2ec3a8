"""Rewrites regular expressions of JSON schemas (ECMA 262) for the grammars of engines, which have no look-around."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<look>\(\?(?:<?[=!]))              # the begin of a look-ahead or look-behind
  | (?P<comment>\(\?\#[^)]*\))
  | (?P<back>\\[1-9][0-9]*|\\k<\w+>|\(\?P=\w+\))
  | (?P<edge>\\[bB])
  | (?P<begin>\^|\\A)
  | (?P<end>\$|\\[zZ])
  | (?P<flags>\(\?[ims]+\))
  | (?P<open>\((?:\?(?:P?<\w+>|[:>]|[ims]+(?:-[ims]+)?:))?)
  | (?P<close>\))
  | (?P<or>\|)
  | (?P<times>(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})[?+]?)
  | (?P<set>\[\^?(?:\\.|[^\]\\])*\])
  | (?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})
  | (?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[\w=]+\}|c[a-zA-Z]|[^bB]))
  | (?P<literal>[^\\\[])
    """,
    re.X | re.S,
)
_CATEGORIES = frozenset(
    (
        *("L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No"),
        *("P", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp"),
        *("C", "Cc", "Cf", "Co", "Letter", "Mark", "Number", "Punctuation", "Symbol", "Separator", "Other"),
        *("Alphabetic", "Uppercase", "Lowercase", "White_Space", "ASCII", "Extended_Pictographic", "Emoji"),
        *("Script=Latin", "Script=Greek", "Script=Cyrillic", "Script=Han", "Script=Hiragana", "Script=Katakana"),
        *("Script=Arabic", "Script=Hebrew", "Script=Hangul", "Script=Thai", "Script=Devanagari"),
    )
)
"""Properties of characters that the engines know by these names."""
_ANYTHING = r"(?s:.*)"
_NO_REPEAT = frozenset({"begin", "end", "open", "or", "flags"})


@dataclass(frozen=True, slots=True)
class PortablePattern:
    """An expression that every engine can compile."""

    text: str
    is_exact: bool
    """False: it also matches texts that the original does not match."""


@dataclass(slots=True)
class _Token:
    kind: str
    text: str


def portable_pattern(pattern: str) -> PortablePattern | None:
    """Return an expression that matches every text that ``pattern`` matches; None if there is no such expression that
    is worth writing, as for one that is malformed.

    What cannot be written (look-around, edges of words, anchors in the middle, references to groups) is left out, so
    that more texts match: an expression has no negation outside of a look-around.
    """
    tokens: list[_Token] = []
    exact = _read(pattern, tokens)
    if exact is None or not _is_balanced(tokens):
        return None
    exact &= _drop_inner_anchors(tokens, "begin", backwards=False)
    exact &= _drop_inner_anchors(tokens, "end", backwards=True)
    return PortablePattern("".join(token.text for token in tokens), exact)


def whole_pattern(pattern: str) -> str:
    """Return an expression of the whole texts in which a portable pattern is found. Anchors within groups are left out,
    so that more texts match."""
    tokens: list[_Token] = []
    if _read(pattern, tokens) is None or not _is_balanced(tokens):
        return _ANYTHING
    ways, start, depth = [], 0, 0
    for at, token in enumerate([*tokens, _Token("or", "")]):
        depth += (token.kind == "open") - (token.kind == "close")
        if token.kind == "or" and not depth:
            ways.append(_whole(tokens[start:at]))
            start = at + 1
    return "|".join(ways)


def _whole(tokens: list[_Token]) -> str:
    kinds = [token.kind for token in tokens if token.text and token.kind != "flags"]
    text = "".join("" if token.kind in ("begin", "end") else token.text for token in tokens)
    before, after = kinds[:1] == ["begin"], kinds[-1:] == ["end"]
    return f"{'' if before else _ANYTHING}{text}{'' if after else _ANYTHING}"


def _read(pattern: str, tokens: list[_Token]) -> bool | None:
    """Add the tokens of a pattern; return whether they match the same texts, or None if it is malformed."""
    at, exact = 0, True
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None:
            return None
        kind, text = str(found.lastgroup), found.group()
        at = found.end()
        if kind == "look":
            if (at := _end_of_group(pattern, at)) < 0:
                return None
            exact, kind, text = False, "literal", "(?:)"
        elif kind in ("back", "edge"):
            exact, text, kind = False, _ANYTHING if kind == "back" else "(?:)", "literal"
        elif kind == "times" and (not tokens or tokens[-1].kind in _NO_REPEAT):
            return None
        else:
            written = _written(kind, text)
            if written is None:
                return None
            text = written
        tokens.append(_Token(kind, text))
    return exact


def _end_of_group(pattern: str, at: int) -> int:
    """Return where the group ends within which ``at`` lies; -1 if it does not end."""
    depth = 1
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None:
            return -1
        at = found.end()
        depth += (found.lastgroup in ("open", "look")) - (found.lastgroup == "close")
        if not depth:
            return at
    return -1


def _written(kind: str, text: str) -> str | None:
    """Return a token as the engines' grammars spell it; None if they have nothing like it."""
    match kind:
        case "comment":
            return ""
        case "begin":
            return "^"
        case "end":
            return "$"
        case "open":
            return "(?:" if text == "(?>" else text
        case "times":
            return text[:-1] if len(text) > 1 and text[-1] == "+" else text
        case "literal":
            return "\\" + text if text in "{}]" else text
        case "pair":
            return _pair(text)
        case "escape":
            return _escape(text)
        case "set":
            return _set(text)
    return text


def _pair(text: str) -> str:
    high, low = int(text[2:6], 16), int(text[8:12], 16)
    return f"\\u{{{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):x}}}"


def _escape(text: str) -> str | None:
    """Return an escape in the common spelling; None for one that means nothing certain."""
    kind = text[1]
    if kind in "pP":
        return text if text[3:-1] in _CATEGORIES else None
    if kind == "c" and len(text) == 3:
        return f"\\x{ord(text[2]) % 32:02x}"
    if kind == "u" and len(text) > 2:
        code = int(text.strip("\\u{}"), 16)
        return text if code < 0x110000 and not 0xD800 <= code < 0xE000 else None
    if kind == "0" and len(text) == 2:
        return "\\x00"
    if len(text) > 2 or kind in "dDwWsStnrfv":
        return text
    if kind.isascii() and kind.isalnum():
        return None
    return text if kind.isascii() and not kind.isspace() and kind not in "<>" else re.escape(kind)


_MEMBER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|[pP]\{[\w=]+\}|c[a-zA-Z]|.)|.",
    re.S,
)


def _set(text: str) -> str | None:
    """Return a set of characters, in which marks that other dialects read are escaped; None for a malformed one."""
    negated = text.startswith("[^")
    members = _MEMBER.findall(text[2 if negated else 1 : -1])
    if not members:
        return r"[\s\S]" if negated else None
    written: list[str] = []
    at = 0
    while at < len(members):
        if members[at + 1 : at + 2] == ["-"] and at + 2 < len(members):
            first, last = _member(members[at]), _member(members[at + 2])
            # A dash beside a class such as \w stands for itself.
            is_range = not (_is_class(members[at]) or _is_class(members[at + 2]))
            if first is None or last is None or (is_range and _code(first) > _code(last)):
                return None
            written += [first, "-" if is_range else r"\-", last]
            at += 3
            continue
        if (each := _member(members[at])) is None:
            return None
        written.append(each)
        at += 1
    return f"[{'^' if negated else ''}{''.join(written)}]"


def _member(member: str) -> str | None:
    if len(member) == 1:
        return "\\" + member if member in "[&~-" else member
    if member == r"\b":
        return r"\x08"
    is_pair = len(member) == 12 and member[1] == "u" and member[2] != "{"
    return _pair(member) if is_pair else _escape(member)


def _is_class(member: str) -> bool:
    return len(member) > 1 and member[1] in "dDwWsSpP"


_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def _code(member: str) -> int:
    """Return the code point of a member of a set, in the common spelling."""
    if len(member) == 1:
        return ord(member)
    digits = member[2:].strip("{}")
    return int(digits, 16) if digits else _CONTROLS.get(member[1], ord(member[1]))


def _is_balanced(tokens: list[_Token]) -> bool:
    depth = 0
    for token in tokens:
        depth += (token.kind == "open") - (token.kind == "close")
        if depth < 0:
            return False
    return depth == 0


def _drop_inner_anchors(tokens: list[_Token], anchor: str, *, backwards: bool) -> bool:
    """Empty the anchors that do not stand at the edge of the text; return whether there were none.

    ``backwards``: look from the end on, for anchors of the end.
    """
    opening, closing = ("close", "open") if backwards else ("open", "close")
    at_edge, outer, exact = True, [], True
    for token in reversed(tokens) if backwards else tokens:
        if token.kind == opening:
            outer.append(at_edge)
        elif token.kind == closing:
            # What stands in the group may be empty, but whether it is decides the text.
            outer.pop()
            at_edge = False
        elif token.kind == "or":
            at_edge = outer[-1] if outer else True
        elif token.kind == anchor:
            if not at_edge:
                token.kind, token.text, exact = "literal", "(?:)", False
        elif token.text not in ("", "(?:)") and token.kind not in ("flags", "times"):
            at_edge = False
    return exact
