"""Tokenizers of models without a ``tokenizer.json``.

One of GPT-2's kind is built from ``vocab.json`` and ``merges.txt``, and SentencePiece's BPE from ``tokenizer.model``;
each is kept as a ``tokenizer.json``, for parts that read only that format.
"""

import hashlib
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom.process import cache_directory
from tokenloom.process.fall_backs import OF_PROCESS

from ..gguf.tokenizer import TokenType, add_special_tokens, sentence_piece_bpe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_FILES = ("vocab.json", "merges.txt")
"""Those of GPT-2's kind."""
_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_WITHOUT_CONFIG = "GPT2Tokenizer"
"""The class where no file names one: other classes with these two files name themselves."""


def has_byte_level_files(path: Path, tokenizer_config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint directory holds both files, and its tokenizer is of GPT-2's class."""
    is_known = tokenizer_config.get("tokenizer_class", _WITHOUT_CONFIG) in _CLASSES
    return is_known and all((path / name).is_file() for name in VOCABULARY_FILES)


def make_byte_level_tokenizer(
    path: Path, tokenizer_config: Mapping[str, Any], special: Mapping[str, str]
) -> "Tokenizer":
    """Return the tokenizer of a checkpoint directory; ``special`` holds its special tokens by name.

    Raises ``ValueError`` if a file is broken.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    try:
        model = models.BPE.from_file(*(str(path / name) for name in VOCABULARY_FILES))
    except Exception as error:  # the library's own class of errors is Exception
        raise ValueError(f"{' and '.join(VOCABULARY_FILES)} cannot be read: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(tokenizer_config.get("add_prefix_space")))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(special.values())])
    bos = special.get("bos_token", "")
    if tokenizer_config.get("add_bos_token") and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


SENTENCE_PIECE_FILE = "tokenizer.model"
_BPE = 2
_MODEL_TYPES = {1: "unigram", 3: "word", 4: "char"}


@dataclass
class SentencePieceModel:
    """Holds what a ``tokenizer.model`` says (fields of ``sentencepiece_model.proto``)."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    """Of each token, a :class:`TokenType`."""
    model_type: int = 1
    byte_fallback: bool = False
    adds_prefix: bool = True
    """Whether a text gets a space before it."""
    drops_spaces: bool = True
    """Whether blanks at the ends of a text, and all but one between words, are dropped."""
    characters: bytes = b""
    """A map of characters to others, compiled; empty: they stay."""

    @classmethod
    def read(cls, path: Path) -> "SentencePieceModel":
        """Raises ``ValueError`` for a file that holds something else."""
        model = cls()
        try:
            for number, part in _fields(path.read_bytes()):
                if number == 1:
                    model._add(dict(_fields(part)))
                elif number == 2:
                    trainer = dict(_fields(part))
                    model.model_type = trainer.get(3, model.model_type)
                    model.byte_fallback = bool(trainer.get(35, False))
                elif number == 3:
                    normalizer = dict(_fields(part))
                    model.characters = normalizer.get(2, b"")
                    model.adds_prefix = bool(normalizer.get(3, True))
                    model.drops_spaces = bool(normalizer.get(4, True))
        except (IndexError, struct.error, TypeError, UnicodeDecodeError, ValueError):
            raise ValueError(f"{path.name} is no model of SentencePiece") from None
        if not model.tokens:
            raise ValueError(f"{path.name} is no model of SentencePiece: it has no tokens")
        return model

    def _add(self, piece: Mapping[int, Any]) -> None:
        self.tokens.append(piece[1].decode())
        self.scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
        self.kinds.append(piece.get(3, TokenType.NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field of a protobuf message: an integer, or bytes."""
    # Without protobuf's descriptors: SentencePiece's own message would be registered twice where its library is loaded.
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(wire_type, 0)
        if wire_type == 2:
            size, at = _varint(data, at)
        if (not size and wire_type != 2) or at + size > len(data):
            raise ValueError("the message is broken")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the number is too long")


def check_sentence_piece(path: Path) -> SentencePieceModel:
    """Return the model of SentencePiece in a checkpoint directory. Raises ``ValueError`` if it is broken, or no BPE."""
    model = SentencePieceModel.read(path / SENTENCE_PIECE_FILE)
    if model.model_type != _BPE:
        kind = _MODEL_TYPES.get(model.model_type, model.model_type)
        raise ValueError(f"{SENTENCE_PIECE_FILE} is a {kind} model of SentencePiece; only its BPE is read")
    return model


def make_sentence_piece_tokenizer(
    path: Path, tokenizer_config: Mapping[str, Any], special: Mapping[str, str]
) -> "Tokenizer":
    """Return the tokenizer of a checkpoint directory with a ``tokenizer.model``; ``special`` holds its special tokens
    by name. Unless the checkpoint says so, a text begins with the begin-of-sequence token and ends with none.

    As in transformers, a text that begins with a blank gets no other one before it.

    Raises ``ValueError`` if the file is broken, or of another kind than BPE.
    """
    from tokenizers import Regex, normalizers, processors

    model = check_sentence_piece(path)
    adds_prefix = tokenizer_config.get("add_prefix_space")
    prefix = "always" if tokenizer_config.get("legacy") else "first"
    if not (model.adds_prefix if adds_prefix is None else adds_prefix):
        prefix = "never"
    unknown = dict(zip(model.kinds, model.tokens, strict=True)).get(TokenType.UNKNOWN)
    tokenizer = sentence_piece_bpe(
        model.tokens, model.scores, model.kinds, unknown, prefix, falls_back_to_bytes=model.byte_fallback
    )
    steps: list[Any] = [normalizers.Precompiled(model.characters)] if model.characters else []
    if model.drops_spaces:  # spaces alone, not line breaks; one that is left at the beginning is the prefix
        kept = "" if prefix == "never" else " "
        ends = [normalizers.Replace(Regex(r"\A +"), kept), normalizers.Replace(Regex(r" +\z"), "")]
        steps += [*ends, normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    add_special_tokens(tokenizer, model.tokens, model.kinds)
    first = special.get("bos_token", "<s>") if tokenizer_config.get("add_bos_token", True) else ""
    last = special.get("eos_token", "</s>") if tokenizer_config.get("add_eos_token", False) else ""
    added = [(text, tokenizer.token_to_id(text)) for text in (first, last) if text]
    if added := [(text, token_id) for text, token_id in added if token_id is not None]:
        texts = [text for text, _ in added]
        single = [*(text for text in texts if text == first), "$A", *(text for text in texts if text == last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=added)
    return tokenizer


def can_make_tokenizer(path: Path, tokenizer_config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint directory without a ``tokenizer.json`` has the files of a tokenizer that is read."""
    return has_byte_level_files(path, tokenizer_config) or (path / SENTENCE_PIECE_FILE).is_file()


def save_tokenizer(tokenizer: "Tokenizer", path: Path, cache_dir: Path | None = None) -> Path | None:
    """Return a ``tokenizer.json`` with the tokenizer of the checkpoint ``path``.

    It is kept under ``cache_dir`` (default :func:`.cache_directory`) under the hash of its content. Returns None with a
    warning if it cannot be written.
    """
    content = tokenizer.to_str().encode()
    name = f"{hashlib.sha256(content).hexdigest()}.json"
    saved = (cache_dir or cache_directory()) / "tokenizers" / name
    try:
        if not saved.is_file() or saved.read_bytes() != content:
            saved.parent.mkdir(parents=True, exist_ok=True)
            draft = saved.with_suffix(f".{uuid.uuid4().hex}")
            draft.write_bytes(content)
            draft.replace(saved)
    except OSError as error:
        OF_PROCESS.begin("no_constraints", f"{path} cannot be saved as {saved}: {error}")
        return None
    return saved
