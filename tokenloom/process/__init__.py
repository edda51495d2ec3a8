"""What every process of ours may use: it imports nothing of ours, so every part may import it."""

import os
import re
from pathlib import Path


def cache_directory() -> Path:
    """Return where compiled kernels, digests and converted tokenizers are kept: ``$XDG_CACHE_HOME/tokenloom``, or
    ``~/.cache/tokenloom`` if the variable is unset, empty or relative. Raises ``RuntimeError`` if this user has no home
    directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "tokenloom"


def hides_gpus(shown: str | None = None) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` leaves no GPU to programs, because it begins with none. ``shown``: its
    value; None: that of this process."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0") if shown is None else shown
    return re.match(r"\s*(\d|GPU-|MIG-)", shown) is None
