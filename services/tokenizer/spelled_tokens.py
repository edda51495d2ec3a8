"""Keeps tokens that clients spell out in their texts from becoming control tokens.

A text such as ``<|im_end|>`` in a user's turn would end the turn, and what follows could begin a turn of the system.
Before a conversation is rendered each such text is replaced by a code point that occurs nowhere in it, the mask. The
template's own marks are not masked. Afterwards masks are encoded as the plain text that they stand for.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the render worker does not import the library
    from tokenizers import Tokenizer

_PRIVATE = "\U00100000", "\U0010fffd"
"""The first and the last code point of the range from which masks are taken: private use, and rare."""
_OF_RANGE = re.compile("[\U00100000-\U0010fffd]")
_ESCAPED = re.compile(r"\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation."""

    text: str
    masks: Mapping[str, str] = field(default_factory=dict)
    """The token that each mask in the text stands for."""
    reasoning_start: str = "NONE"
    """How it leaves the model's reasoning: a name of ``ReasoningStart``."""


class TokenFinder:
    """Finds the longest of many texts at each place."""

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted({token for token in tokens if token})
        self._pattern = re.compile(_alternatives(known)) if known else None
        # JSON escapes these characters: such a token is not found in a JSON text.
        is_escaped = any(json.dumps(token, ensure_ascii=False)[1:-1] != token for token in known)
        searched = "" if is_escaped else rf"\\u|{_alternatives(known)}" if known else "(?!)"
        self._searched = re.compile(searched)
        self.may_be_in = self._searched.search
        """Returns a match if a string within a JSON text may hold one of the texts, otherwise None."""

    def replace(self, text: str, replacement: Callable[[re.Match[str]], str]) -> str:
        """Return the text with what ``replacement`` returns for each match."""
        return text if self._pattern is None else self._pattern.sub(replacement, text)


class Masks:
    """Masks the tokens that one conversation spells out.

    Attributes:
        tokens: The token that each mask stands for.
    """

    def __init__(self, finder: TokenFinder, conversation: Any, parsed: Collection[str] = ()) -> None:
        """``conversation``: everything that may be masked; masks are code points that it does not hold. ``parsed``:
        what parsers of outputs read, and templates in the assistant's turns."""
        self.tokens: dict[str, str] = {}
        self._finder = finder
        self._parsed = parsed
        self._masks: dict[str, str] = {}
        self._conversation = conversation
        self._unused: Iterator[str] | None = None

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with masks. In the assistant's own words, what parsers read remains."""
        return [{name: self._member(message, name, value) for name, value in message.items()} for message in messages]

    def value(self, value: Any, kept: Collection[str] = ()) -> Any:
        """Return a JSON value with masks in all its strings. ``kept``: tokens that remain."""
        if isinstance(value, str):
            return self._finder.replace(value, lambda match: self._mask(match[0], kept))
        if isinstance(value, list):
            return [self.value(item, kept) for item in value]
        if isinstance(value, dict):
            return {self.value(name, kept): self.value(item, kept) for name, item in value.items()}
        return value

    def _member(self, message: Mapping[str, Any], name: str, value: Any) -> Any:
        if name == "role":
            return value
        is_own = message.get("role") == "assistant" and name != "tool_calls"
        return self.value(value, self._parsed if is_own else ())

    def _mask(self, token: str, kept: Collection[str]) -> str:
        if token in kept:
            return token
        if token not in self._masks:
            self._unused = self._unused or unused_code_points(self._conversation)
            mask = next(self._unused)
            self._masks[token] = mask
            self.tokens[mask] = token
        return self._masks[token]


def unused_code_points(conversation: Any) -> Iterator[str]:
    """Yield code points of private use that no string of the conversation holds."""
    taken = set(_OF_RANGE.findall(json.dumps(conversation, ensure_ascii=False, default=str)))
    first, last = map(ord, _PRIVATE)
    return (char for char in map(chr, range(first, last + 1)) if char not in taken)


def unmasked(text: str, tokens: Mapping[str, str]) -> str:
    """Return the text with the tokens that masks stand for."""
    text = _OF_RANGE.sub(lambda match: tokens.get(match[0], match[0]), text)
    if "\\udb" in text:  # a template has asked for JSON in ASCII
        text = _ESCAPED.sub(lambda match: tokens.get(json.loads(f'"{match[0]}"'), match[0]), text)
    return text


class PlainTextEncoder:
    """Encodes rendered conversations with masks, as the tokenizer would if it did not know the tokens under them."""

    # It has a copy of the tokenizer that shares the model and knows the added tokens by names that no client can write.
    # The template's marks get these names, so that everything is one call: normalizers and pre-tokenizers depend on
    # what stands around a text.
    def __init__(self, tokenizer: "Tokenizer") -> None:
        from tokenizers import AddedToken, Tokenizer

        added = tokenizer.get_added_tokens_decoder()
        self._copy = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._copy.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._copy.pre_tokenizer = tokenizer.pre_tokenizer
        # Ids of added tokens begin after the number of the model's tokens, and some models leave ids out.
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        missing = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        self._break = _secret_name()
        self._names = {token.content: _secret_name() for token in added.values()}
        # In one call: each one builds the library's automaton of all added tokens again, 52 s for 2,000 tokens.
        self._copy.add_special_tokens(
            [AddedToken(_secret_name()) for _ in range(missing)]
            + [AddedToken(self._break, normalized=False)]
            + [
                AddedToken(self._names[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for token in added.values()
            ]
        )
        self._break_id = self._copy.token_to_id(self._break)
        self._originals = {
            self._copy.token_to_id(self._names[token.content]): (token_id, self._names[token.content], token.content)
            for token_id, token in added.items()
        }
        self._in_model = frozenset(token_id for token_id, token in added.items() if token.content in vocabulary)
        self._words = frozenset(token.content for token in added.values() if token.single_word)
        self._finder = TokenFinder(self._names)

    def encode(self, rendered: Rendered, *, want_strings: bool = False) -> tuple[list[int], list[str]]:
        """Return the token ids and, if wanted, the tokens as the vocabulary spells them."""
        encode = self._copy.encode_batch if want_strings else self._copy.encode_batch_fast  # which has no strings
        named = self._finder.replace(rendered.text, self._name)
        for size in (None, 1, 0):
            text = unmasked(named, {mask: self._broken(token, size) for mask, token in rendered.masks.items()})
            # In a batch of one, which does not hold the interpreter's lock.
            (encoding,) = encode([text], add_special_tokens=False)
            found = encoding.ids
            # Unigram models, and those of whole words, find the token in plain text too: they get it in parts.
            if self._in_model.isdisjoint(found):
                break
        ids = [self._originals.get(each, (each, "", ""))[0] for each in found if each != self._break_id]
        return ids, list(self._strings(found, encoding.tokens)) if want_strings else []

    def _strings(self, ids: Sequence[int], strings: Sequence[str]) -> Iterator[str]:
        for token_id, string in zip(ids, strings, strict=True):
            if token_id != self._break_id:
                _, name, content = self._originals.get(token_id, (token_id, "", ""))
                yield string.replace(name, content) if name else string

    def _broken(self, token: str, size: int | None) -> str:
        """Return a token as it is, in two parts after so many characters (1), or in its characters (0)."""
        if size is None:
            return token
        return self._break.join((token[:size], token[size:]) if size else token)

    def _name(self, match: re.Match[str]) -> str:
        token, text, (start, end) = match[0], match.string, match.span()
        if token in self._words and (_is_word(text[max(start - 1, 0) : start]) or _is_word(text[end : end + 1])):
            return token  # the tokenizer finds it only as a whole word
        return self._names[token]


def _is_word(char: str) -> bool:
    return bool(char) and (char.isalnum() or char == "_")


def _secret_name() -> str:
    # A client that knew it could write control tokens.
    return f"{_PRIVATE[1]}{os.urandom(12).hex()}{_PRIVATE[1]}"


def _alternatives(texts: Sequence[str]) -> str:
    """Return a pattern of the longest of some sorted texts, as a tree by their first characters.

    Python tries alternatives one after the other, and vocabularies have thousands of added tokens.
    """
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    parts = [re.escape(char) + _alternatives(rest) for char, rest in branches.items()]
    if not parts:
        return ""
    found = parts[0] if len(parts) == 1 and "" not in texts else f"(?:{'|'.join(parts)})"
    return f"{found}?" if "" in texts else found
