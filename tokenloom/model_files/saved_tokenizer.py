"""Keeps tokenizers that were made from other files as ``tokenizer.json``, for parts that read only that format."""

import hashlib
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tokenloom.process.fall_backs import OF_PROCESS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
