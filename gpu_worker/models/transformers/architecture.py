"""Reads the name of a checkpoint's class."""

import json
from pathlib import Path
from typing import Any


def read_architecture(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the first entry of ``architectures`` and all of ``config.json``. Raises ``ValueError``."""
    file = path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} has no config.json: not a Hugging Face checkpoint directory") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    names = values.get("architectures") if isinstance(values, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"{file}: architectures must name the model's class, such as LlamaForCausalLM")
    return names[0], values
