"""Reads the files of a LoRA adapter, in the layout of the peft library."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterFiles(NamedTuple):
    """Holds what the files of an adapter contain."""

    config: dict[str, Any]
    weights: bytes
    """The content of ``adapter_model.safetensors``."""
    digest: bytes
    """SHA-256 over both files."""


def read_adapter_files(path: Path) -> AdapterFiles:
    """Read the directory ``path``. Raises ``ValueError`` naming the file that is missing or wrong."""
    try:
        config_bytes, weights = (path / CONFIG).read_bytes(), (path / WEIGHTS).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path.name}: {error.strerror}; a LoRA adapter is a directory with the files {CONFIG} and {WEIGHTS}"
        ) from None
    try:
        config = json.loads(config_bytes)
    except ValueError as error:
        raise ValueError(f"{CONFIG}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG}: must be a JSON object")
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(weights)
    return AdapterFiles(config, weights, digest.digest())


def read_rank(config: dict[str, Any], max_rank: int) -> int:
    """Return the rank that an adapter's configuration states. Raises ``ValueError`` if it is not from 1 to
    ``max_rank``."""
    rank = config.get("r")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise ValueError(f"r is {rank!r}; this engine loads adapters of ranks from 1 to {max_rank} (--max-lora-rank)")
    return rank
