"""What an engine needs to know of a checkpoint to constrain outputs."""

import hashlib
from pathlib import Path

from tokenloom.engine_core.config import StructuredOutputConfig

from ..runtime.checkpoint import CheckpointInfo


def structured_output_config(checkpoint: Path, backend: str = "auto") -> StructuredOutputConfig | None:
    """For the model in this directory; None: it has no ``tokenizer.json``, so its outputs cannot be constrained."""
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return None
    return StructuredOutputConfig(
        tokenizer=str(file),
        tokenizer_digest=hashlib.sha256(file.read_bytes()).digest(),
        eos_token_ids=CheckpointInfo.load(checkpoint).eos_token_ids,
        backend="llguidance" if backend == "auto" else backend,
    )
