"""What every process of ours may use: it imports nothing of ours, so every part may import it."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return where compiled kernels, digests and converted tokenizers are kept: ``$XDG_CACHE_HOME/tokenloom``, or
    ``~/.cache/tokenloom`` if the variable is unset, empty or relative. Raises ``RuntimeError`` if this user has no home
    directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "tokenloom"
