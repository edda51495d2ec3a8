"""Tokenizers of models without a ``tokenizer.json``.

One of GPT-2's kind is built from ``vocab.json`` and ``merges.txt``; each is kept as a ``tokenizer.json``, for parts
that read only that format.
"""

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenloom.process.fall_backs import OF_PROCESS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_FILES = ("vocab.json", "merges.txt")
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


def save_tokenizer(tokenizer: "Tokenizer", path: Path, cache_dir: Path | None = None) -> Path | None:
    """Return a ``tokenizer.json`` with the tokenizer of the checkpoint ``path``.

    It is kept under ``cache_dir`` (default ``~/.cache/tokenloom``) under the hash of its content. Returns None with a
    warning if it cannot be written.
    """
    content = tokenizer.to_str().encode()
    name = f"{hashlib.sha256(content).hexdigest()}.json"
    saved = (cache_dir or Path.home() / ".cache" / "tokenloom") / "tokenizers" / name
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
