"""Describes LoRA adapters, between worker and core and between core and client, and reads their files, which are in the
layout of the peft library."""

import enum
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class LoraInfo(msgspec.Struct, frozen=True, array_like=True):
    """Describes an adapter that a worker has read."""

    digest: bytes
    """SHA-256 over its files."""
    rank: int


class LoraState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Describes an adapter that requests may name."""

    name: str
    digest: bytes
    path: str
    """The directory from which it was read."""
    rank: int
    pinned: bool
    in_slot: bool
    """Whether it occupies a slot of the device."""
    num_waiting: int
    """Requests with it that wait."""
    num_running: int


class LoraErrorKind(enum.IntEnum):
    """Says why an operation on adapters failed."""

    INVALID = 0
    """The files are not an adapter of this model."""
    CONFLICT = 1
    """Another adapter has the name, or the files are others than expected."""
    FULL = 2
    """Every adapter that could make room is pinned or in use."""
    NOT_FOUND = 3
    """No adapter has the name."""


class LoraAnswer(msgspec.Struct, array_like=True):
    """Answers an operation on adapters."""

    adapters: list[LoraState]
    """All that are loaded now, by name."""
    error: str = ""
    """Why the operation failed; empty: it did not."""
    kind: LoraErrorKind = LoraErrorKind.INVALID


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
