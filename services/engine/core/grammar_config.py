"""Configures constrained outputs for a checkpoint."""

import hashlib
from pathlib import Path

from tokenloom.checkpoint import CheckpointInfo
from tokenloom.engine_core.config import StructuredOutputConfig


def structured_output_config(checkpoint: Path, backend: str = "auto") -> StructuredOutputConfig | None:
    """Return the configuration for the model in this directory; None if it has no ``tokenizer.json``, without which
    outputs cannot be constrained."""
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return None
    return StructuredOutputConfig(
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
        backend="llguidance" if backend == "auto" else backend,
    )
