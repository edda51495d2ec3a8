"""Directories that the hash worker reads as LoRA adapters."""

import json
from pathlib import Path

from tokenloom.engine_core.data.lora import read_adapter_files


def make_adapter(path: Path, rank: int = 4) -> bytes:
    """Write an adapter whose content is its path's name; return its digest."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (path / "adapter_model.safetensors").write_text(path.name)
    return read_adapter_files(path).digest
