"""Tabulates the text of each token, once per tokenizer, so that a token costs one list access."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

Piece = str | bytes
"""Text that stands on its own, or bytes that begin, continue or end inside a UTF-8 character; "" for no text."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Rule:
    """Says how a tokenizer's decoder treats one token, for decoders that treat each token by itself."""

    piece: Callable[[str], Piece]
    strips_start: bool = False
    replaces_each_byte: bool = False


class Vocabulary:
    """Holds what an incremental decoder needs of a ``tokenizers.Tokenizer``; one serves all requests.

    ``is_tabulated`` is false for decoders whose tokens change their neighbours (WordPiece, CTC and the like);
    text is then made by decoding windows of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        rule = _rule_of(tokenizer)
        self.is_tabulated = rule is not None
        self.strips_start = rule is not None and rule.strips_start
        """Whether the decoder drops a space at the very beginning of a text (SentencePiece's prefix space)."""
        self.replaces_each_byte = rule is not None and rule.replaces_each_byte
        """Whether malformed UTF-8 becomes U+FFFD per byte (byte fallback), not per broken sequence (byte level)."""
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self.pieces: list[Piece] = [] if rule is None else _tabulate(tokenizer, rule)
        """[largest id + 1] the piece of each token; larger ids have no text."""
        self.pieces_without_special = ["" if i in self._special else piece for i, piece in enumerate(self.pieces)]
        """The same for outputs that skip special tokens."""

    def is_blank(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether the decoder never sees this token: it is skipped, or it pads the model's vocabulary."""
        return (skip_special_tokens and token_id in self._special) or self.tokenizer.id_to_token(token_id) is None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of the token alone, special or not; b"" beyond the vocabulary."""
        if not self.is_tabulated:
            return self.decode([token_id], False).encode()
        piece = self.pieces[token_id] if token_id < len(self.pieces) else b""
        return piece.encode() if isinstance(piece, str) else piece

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode a complete sequence with the tokenizer itself."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def _tabulate(tokenizer: Tokenizer, rule: _Rule) -> list[Piece]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    pieces: list[Piece] = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = rule.piece(token)
    for token_id in tokenizer.get_added_tokens_decoder():  # the decoder sees them normalized
        pieces[token_id] = rule.piece(tokenizer.id_to_token(token_id) or "")
    return pieces


def _rule_of(tokenizer: Tokenizer) -> _Rule | None:
    decoder = tokenizer.decoder
    if decoder is None:
        return None
    config = json.loads(decoder.__getstate__())  # only the decoder: the JSON of a whole tokenizer takes tens of MB
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return _Rule(_byte_level_piece())
        case ["Metaspace"]:
            strips = steps[0].get("prepend_scheme", "always") != "never"
            return _Rule(_replacing_piece([(steps[0]["replacement"], " ")]), strips_start=strips)
        case _:
            return _sentencepiece_rule(steps)


def _byte_level_piece() -> Callable[[str], Piece]:
    # The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes are moved past U+00FF.
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    kept = [byte for byte in range(256) if chr(byte) in alphabet]
    moved = [byte for byte in range(256) if chr(byte) not in alphabet]
    to_byte = {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}

    def piece(token: str) -> Piece:
        try:
            return _text_if_complete(bytes([to_byte[char] for char in token]))
        except KeyError:  # an added token, written as it is
            return token

    return piece


def _sentencepiece_rule(steps: Sequence[Mapping[str, Any]]) -> _Rule | None:
    """Return the rule for Replace*, ByteFallback?, Fuse?, Strip? in this order, which converted SentencePiece models
    have; None for other decoders."""
    rest = list(steps)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    replaced = _replacing_piece(replacements)
    kinds = [step["type"] for step in rest]
    has_bytes = kinds[:1] == ["ByteFallback"]
    match kinds[1:] if has_bytes else kinds:
        case [] | ["Fuse"]:
            strips = False
        case ["Fuse", "Strip"] if _strips_one_space(rest[-1]):
            strips = True
        case _:
            return None
    piece = _byte_fallback_piece(replaced) if has_bytes else replaced
    return _Rule(piece, strips_start=strips, replaces_each_byte=has_bytes)


def _strips_one_space(step: Mapping[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


def _replacing_piece(replacements: Sequence[tuple[str, str]]) -> Callable[[str], Piece]:
    def piece(token: str) -> Piece:
        for old, new in replacements:
            token = token.replace(old, new)
        return token

    return piece


def _byte_fallback_piece(inner: Callable[[str], Piece]) -> Callable[[str], Piece]:
    def piece(token: str) -> Piece:
        byte = _BYTE_TOKEN.fullmatch(token)
        return _text_if_complete(bytes.fromhex(byte[1])) if byte else inner(token)

    return piece


def _text_if_complete(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
