"""Reads what a model's GGUF file says about everything except weights, with the errors that clients are sent."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..gguf import tokenizer
from ..gguf.gguf_file import GgufFile, read_gguf
from ..request.errors import InvalidArgument, NotFound
from .tokenizer_json import save_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")


def load_gguf_tokenizer(path: Path) -> "Tokenizer":
    """Return the tokenizer. Raises ``NotFound`` if the file is absent, ``InvalidArgument`` for one that is broken, or
    has no tokenizer or an unsupported one."""
    return _read(path, tokenizer.make_tokenizer)


def load_gguf_description(path: Path) -> tuple[tuple[int, ...], str, dict[str, str]]:
    """Return the ids that end an answer, the chat template (empty: none) and the special tokens by name.

    Raises the errors of :func:`load_gguf_tokenizer`.
    """
    return _read(
        path,
        lambda file: (tokenizer.eos_token_ids(file), tokenizer.chat_template(file), tokenizer.special_tokens(file)),
    )


def save_gguf_tokenizer(path: Path, cache_dir: Path | None = None) -> Path | None:
    """Return a ``tokenizer.json`` with the file's tokenizer, for parts that read only that format.

    See :func:`..saved_tokenizer.save_tokenizer`. Raises the errors of :func:`load_gguf_tokenizer`.
    """
    return save_tokenizer(load_gguf_tokenizer(path), path, cache_dir)


def gguf_tokenizer_fingerprint(path: Path) -> bytes:
    """Return the SHA-256 of the file's entries about the tokenizer, the chat template included."""

    def digest(file: GgufFile) -> bytes:
        result = hashlib.sha256()
        with file.path.open("rb") as stream:
            for begin, end in tokenizer.tokenizer_entries(file):
                stream.seek(begin)
                result.update(stream.read(end - begin))
        return result.digest()

    return _read(path, digest)


def _read(path: Path, read: Callable[[GgufFile], T]) -> T:
    try:
        return read(read_gguf(path))
    except OSError as error:
        raise NotFound(f"model {path.name!r} cannot be read: {error.strerror}", field="model") from None
    except ValueError as error:
        raise InvalidArgument(f"model {path.name!r}: {error}", "model") from None
