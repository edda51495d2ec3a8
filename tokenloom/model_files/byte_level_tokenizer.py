"""Builds GPT-2's kind of tokenizer from ``vocab.json`` and ``merges.txt``, for checkpoints without a tokenizer.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
