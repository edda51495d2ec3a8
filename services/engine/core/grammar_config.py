"""Configures constrained outputs for a checkpoint."""

import hashlib
from pathlib import Path

from msgspec.structs import replace

from tokenloom.checkpoint import CheckpointInfo
from tokenloom.engine_core.config import StructuredOutputConfig


def structured_output_config(
    checkpoint: Path, chosen: StructuredOutputConfig | None = None
) -> StructuredOutputConfig | None:
    """Complete the configuration for the model in this directory.

    Returns None if the model has no ``tokenizer.json``, so that its outputs cannot be constrained.
    """
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return None
    return replace(
        chosen or StructuredOutputConfig(),
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
    )
