"""Tokenizers of models without a ``tokenizer.json``.

One of GPT-2's kind is built from ``vocab.json`` and ``merges.txt``, and one of SentencePiece from its model, BPE or
unigram; each is kept as a ``tokenizer.json``, for parts that read only that format.
"""

import hashlib
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom.process import cache_directory
from tokenloom.process.fall_backs import OF_PROCESS

from ..gguf.tokenizer import TokenType, add_special_tokens, sentence_piece_bpe, sentence_piece_unigram

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


_SENTENCE_PIECE_FILE, _OF_T5, _OF_XLM_ROBERTA = "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"
SENTENCE_PIECE_FILES = (_SENTENCE_PIECE_FILE, _OF_T5, _OF_XLM_ROBERTA)
_UNIGRAM, _BPE = 1, 2
_MODEL_TYPES = {_UNIGRAM: "unigram", 3: "word", 4: "char"}
_CLASS = "tokenizer_class"
_T5, _XLM_ROBERTA = "T5Tokenizer", "XLMRobertaTokenizer"
_FILE_OF = {"MT5Tokenizer": _OF_T5, _T5: _OF_T5, _XLM_ROBERTA: _OF_XLM_ROBERTA}
"""By class, the file that transformers names. Others with such a file arrange their ids in ways that are not read."""
_AS_THEY_ARE = (
    "",
    "LlamaTokenizer",
    "GemmaTokenizer",
    "PreTrainedTokenizer",
    "TokenizersBackend",
    "CodeLlamaTokenizer",
)
"""Classes of unigram models whose pieces have the ids of their places."""


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

    def append(self, texts: Sequence[str]) -> None:
        """Add control tokens after the others."""
        self.tokens += texts
        self.scores += [0.0] * len(texts)
        self.kinds += [TokenType.CONTROL] * len(texts)

    def begin_as_fairseq(self) -> None:
        """Give the first four ids to the tokens of fairseq, which has a padding before the others, and add a mask."""
        first = ["<s>", "<pad>", "</s>", "<unk>"]
        self.tokens[:3], self.scores[:3] = first, [0.0] * len(first)
        self.kinds[:3] = [*[TokenType.CONTROL] * 3, TokenType.UNKNOWN]
        self.append(["<mask>"])

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


def _class_of(tokenizer_config: Mapping[str, Any]) -> str:
    return str(tokenizer_config.get(_CLASS) or "").removesuffix("Fast")


def _sentence_piece_file(path: Path, tokenizer_config: Mapping[str, Any]) -> Path | None:
    """Return the model of SentencePiece in a checkpoint directory, if its class is one whose file is read."""
    names = (_SENTENCE_PIECE_FILE, _FILE_OF.get(_class_of(tokenizer_config)))
    return next((path / name for name in names if name and (path / name).is_file()), None)


def check_sentence_piece(path: Path, tokenizer_config: Mapping[str, Any]) -> SentencePieceModel:
    """Return the model of SentencePiece in a checkpoint directory, with the tokens that its class adds.

    Raises ``ValueError`` if it is broken, or of a kind or class that is not read.
    """
    file, kind = _sentence_piece_file(path, tokenizer_config), _class_of(tokenizer_config)
    model = SentencePieceModel.read(file or path / _SENTENCE_PIECE_FILE)
    name = file.name if file else _SENTENCE_PIECE_FILE
    if model.model_type not in (_BPE, _UNIGRAM):
        found = _MODEL_TYPES.get(model.model_type, model.model_type)
        raise ValueError(f"{name} is a {found} model of SentencePiece; only BPE and unigram are read")
    if kind == _XLM_ROBERTA:
        model.begin_as_fairseq()
    elif kind in _FILE_OF:
        count = int(tokenizer_config.get("extra_ids", 100))
        model.append([f"<extra_id_{number}>" for number in reversed(range(count))])
    elif model.model_type == _UNIGRAM and kind not in _AS_THEY_ARE:
        raise ValueError(f"{name} is a unigram model, whose ids {kind} arranges in a way that is not read")
    return model


def make_sentence_piece_tokenizer(
    path: Path, tokenizer_config: Mapping[str, Any], special: Mapping[str, str]
) -> "Tokenizer":
    """Return the tokenizer of a checkpoint directory with a model of SentencePiece; ``special`` holds its special
    tokens by name. Unless the checkpoint says so, a text begins with the begin-of-sequence token and ends with none,
    except with the classes of T5 (an end alone) and XLM-RoBERTa (both).

    As in transformers, a text that begins with a blank gets no other one before it.

    Raises ``ValueError`` if the file is broken, or of a kind that is not read.
    """
    from tokenizers import Regex, normalizers

    model, kind = check_sentence_piece(path, tokenizer_config), _class_of(tokenizer_config)
    adds_prefix = tokenizer_config.get("add_prefix_space")
    prefix = "always" if tokenizer_config.get("legacy") else "first"
    if not (model.adds_prefix if adds_prefix is None else adds_prefix):
        prefix = "never"
    unknown = dict(zip(model.kinds, model.tokens, strict=True)).get(TokenType.UNKNOWN)
    build = sentence_piece_bpe if model.model_type == _BPE else sentence_piece_unigram
    tokenizer = build(model.tokens, model.scores, model.kinds, unknown, prefix, falls_back_to_bytes=model.byte_fallback)
    steps: list[Any] = [normalizers.Precompiled(model.characters)] if model.characters else []
    if model.drops_spaces:  # spaces alone, not line breaks; one that is left at the beginning is the prefix
        kept = "" if prefix == "never" else " "
        ends = [normalizers.Replace(Regex(r"\A +"), kept), normalizers.Replace(Regex(r" +\z"), "")]
        steps += [*ends, normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    add_special_tokens(tokenizer, model.tokens, model.kinds)
    begins, ends_text = kind not in _FILE_OF or kind == _XLM_ROBERTA, kind in _FILE_OF
    first = special.get("bos_token", "<s>") if tokenizer_config.get("add_bos_token", begins) else ""
    last = special.get("eos_token", "</s>") if tokenizer_config.get("add_eos_token", ends_text) else ""
    _surround(tokenizer, first, last, is_pair_apart=kind == _XLM_ROBERTA)
    return tokenizer


def _surround(tokenizer: "Tokenizer", first: str, last: str, *, is_pair_apart: bool) -> None:
    """Let encoding add those of two tokens that the vocabulary has. ``is_pair_apart``: whether two texts of a pair have
    another one of the last between them."""
    from tokenizers import processors

    ids = {text: tokenizer.token_to_id(text) for text in (first, last) if text}
    before, after = ([text] if ids.get(text) is not None else [] for text in (first, last))
    if before or after:
        between = after * 2 if is_pair_apart else [*after, *before]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *between, "$B", *after],
            special_tokens=[(text, token_id) for text, token_id in ids.items() if token_id is not None],
        )


def can_make_tokenizer(path: Path, tokenizer_config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint directory without a ``tokenizer.json`` has the files of a tokenizer that is read."""
    return has_byte_level_files(path, tokenizer_config) or _sentence_piece_file(path, tokenizer_config) is not None


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
