"""Finds the weight files of a checkpoint directory."""

import json
from pathlib import Path

_SINGLE = ("model.safetensors", "pytorch_model.bin")
"""safetensors files win: many checkpoints hold both."""
_INDEX_SUFFIX = ".index.json"


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint, all of one format. Raises ``ValueError`` if one is missing."""
    for single in _SINGLE:
        if (directory / single).is_file():
            return [directory / single]
        if (index := directory / f"{single}{_INDEX_SUFFIX}").is_file():
            return _files_of(index)
    names = " nor ".join(f"{single}[{_INDEX_SUFFIX}]" for single in _SINGLE)
    raise ValueError(f"{directory} has neither {names}: no weights in a format that is read")


def is_pickled(path: Path) -> bool:
    """Return whether a weight file is one of ``torch.save``, and not a safetensors file."""
    return path.suffix == ".bin"


def _files_of(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{index} must be a JSON object with a weight_map") from None
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ValueError(f"{index} names the file {name!r}, which is not in the directory")
    return [index.parent / name for name in names]
