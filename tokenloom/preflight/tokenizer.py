"""Checks the tokenizer of a checkpoint directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenloom.model_files.byte_level_tokenizer import has_byte_level_files

from .refusal import CannotServe
from .small_files import read_object

_COPY = "copy the file from the model's original checkpoint"
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json", "tiktoken.model")
_CONVERT = "run AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers, which writes one"


def check_tokenizer(path: Path, config: Mapping[str, Any]) -> None:
    """Check the tokenizer in a directory against the content of its ``config.json``. Raises `CannotServe`."""
    settings = path / "tokenizer_config.json"
    values = read_object(settings) if settings.exists() or settings.is_symlink() else {}
    file = path / "tokenizer.json"
    if not file.exists() and not file.is_symlink():
        _check_other_files(path, values)
        return
    tokenizer = read_object(file)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise CannotServe(f"{file} is not a tokenizer of the tokenizers library, because it has no model: {_COPY}")
    _check_ids(file, model.get("vocab"), config)


def _check_other_files(path: Path, settings: Mapping[str, Any]) -> None:
    if has_byte_level_files(path, settings):
        return
    found = next((name for name in _SLOW if (path / name).is_file()), None)
    if found is None:
        raise CannotServe(f"{path} has no tokenizer.json: {_COPY}")
    raise CannotServe(f"{path} has no tokenizer.json, only {found}, which is not read: {_CONVERT}")


def _check_ids(file: Path, vocabulary: object, config: Mapping[str, Any]) -> None:
    """Raise `CannotServe` if a token of the vocabulary has no row in the embeddings. Tokens that were added to the
    vocabulary may lack one: texts seldom hold them, and some models come so."""
    size = config.get("vocab_size")
    if not isinstance(vocabulary, dict) or not isinstance(size, int):
        return
    # Only what is sure to fail is refused. Tokens that were added beyond the vocabulary pass, because models are
    # published so.
    highest = max((value for value in vocabulary.values() if isinstance(value, int)), default=0)
    if highest >= size:
        raise CannotServe(
            f"{file} has tokens up to id {highest}, but {file.parent / 'config.json'} says vocab_size {size}: it is "
            f"the tokenizer of another model; {_COPY}"
        )
