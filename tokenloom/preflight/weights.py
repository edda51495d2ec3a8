"""Checks that the weight files of a checkpoint directory are whole, from their first bytes and their sizes."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenloom.gpu_worker.checkpoint.files.weight_files import is_pickled, weight_files
from tokenloom.gpu_worker.checkpoint.supported import ARCHITECTURES

from .refusal import CannotServe
from .small_files import check_content, read_object

_AGAIN = "download it again"
_ZIP = b"PK"
_LONGEST_HEADER = 100 << 20
"""What the safetensors library reads at most."""
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
"""Names of the matrix [vocab_size, hidden_size] in checkpoints of the usual families."""


def check_weights(path: Path, config: Mapping[str, Any]) -> None:
    """Check the weights in a directory against ``config``, the content of its ``config.json``. Raises `CannotServe`."""
    _check_index(path)
    _check_unfinished(path)
    try:
        files = weight_files(path)
    except ValueError:
        raise CannotServe(_about_missing(path)) from None
    for file in files:
        if is_pickled(file):
            _check_pickled(file)
        else:
            _check_embeddings(path, file, _read_header(file), config)


def _check_index(path: Path) -> None:
    for index in sorted(path.glob("*.index.json")):
        if index.name not in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            continue
        if (path / index.name.removesuffix(".index.json")).is_file():
            continue
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CannotServe(f"{index} has no weight_map: {_AGAIN}")
        missing = sorted({str(name) for name in shards.values() if not (path / str(name)).exists()})
        if missing:
            raise CannotServe(
                f"{index} names {missing[0]}, which is not in the directory ({len(missing)} of "
                f"{len(set(shards.values()))} files are missing): download the missing files"
            )


def _check_unfinished(path: Path) -> None:
    for pattern in ("*.incomplete", "*.part", "*.crdownload", "*.aria2"):
        if unfinished := sorted(path.glob(pattern)):
            raise CannotServe(
                f"{unfinished[0]} is a download that has not ended: finish it, or download the file again"
            )


def _about_missing(path: Path) -> str:
    links = [file for file in sorted(path.glob("*.safetensors")) if file.is_symlink() and not file.exists()]
    if links:
        return f"{links[0]} is a link to {links[0].readlink()}, which does not exist: download the model again"
    named = sorted({*path.glob("*.safetensors"), *path.glob("*.bin")} - set(path.glob("training_args.bin")))
    if named:
        return f"{path} has no model.safetensors nor an index of several files: rename {named[0].name}, or {_AGAIN}"
    return f"{path} has config.json but no weights: download model.safetensors, or all files that its index names"


def _check_pickled(file: Path) -> None:
    head = check_content(file)
    if not head.startswith(_ZIP):
        raise CannotServe(
            f"{file} is not a file of torch.save since PyTorch 1.6: convert it to safetensors with save_pretrained of "
            "transformers, or download it again"
        )


def _read_header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: names, dtypes, shapes and offsets of its tensors.

    Raises `CannotServe`.
    """
    head = check_content(file)
    size = file.stat().st_size
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else size
    if length > min(size, _LONGEST_HEADER):
        raise CannotServe(f"{file} is not a safetensors file, or was cut off in its header: {_AGAIN}")
    with file.open("rb") as stream:
        stream.seek(8)
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        needed = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CannotServe(
            f"{file} is not a safetensors file: its header is no JSON object of tensors: {_AGAIN}"
        ) from None
    if size < needed:
        raise CannotServe(f"{file} is cut off: it has {size:,} bytes, and its header describes {needed:,}: {_AGAIN}")
    return header


def _check_embeddings(path: Path, file: Path, header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise `CannotServe` if the weights are those of another model than ``config.json`` describes."""
    if config["architectures"][0] not in ARCHITECTURES:
        return  # others may store embeddings of another size
    for name in _EMBEDDINGS:
        shape = header[name].get("shape") if name in header else None
        hidden = config.get("word_embed_proj_dim") or config.get("hidden_size") or config.get("n_embd")
        wanted = [config.get("vocab_size"), hidden]
        if shape is None or None in wanted or shape == wanted:
            continue
        raise CannotServe(
            f"{file}: {name} is {shape}, but {path / 'config.json'} says vocab_size {wanted[0]} and hidden_size "
            f"{wanted[1]}: take both files from the same checkpoint"
        )
