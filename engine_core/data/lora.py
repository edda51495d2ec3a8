"""Options of LoRA adapters; describes them, between worker and core and between core and client, and reads their files,
which are in the layout of the peft library."""

import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from tokenloom.request.adapter_names import check_adapter_name
from tokenloom.request.errors import InvalidArgument

_Slots = Annotated[int, Meta(ge=1)]
_Rank = Annotated[int, Meta(ge=1, le=256)]


class LoraConfig(Struct, frozen=True):
    """LoRA adapters, of which each request may name one."""

    enable: Annotated[bool, "Let requests name LoRA adapters as their model.", Meta(extra={"name": "enable_lora"})] = (
        False
    )
    max_loras: Annotated[_Slots, "LoRA adapters in a batch."] = 8
    max_lora_rank: Annotated[_Rank, "Largest rank of a LoRA adapter."] = 64
    max_cpu_loras: Annotated[
        _Slots | None, "LoRA adapters that an engine keeps in memory; by default 32, or --max-loras if that is more."
    ] = None
    modules: Annotated[
        tuple[str, ...],
        "LoRA adapters to load at start: name=path, separated by commas, or vLLM's JSON objects with name and path; a "
        "path is a directory of the peft library.",
        Meta(extra={"name": "lora_modules"}),
    ] = ()

    @property
    def max_loaded(self) -> int:
        """Return how many adapters may be in memory."""
        return self.max_cpu_loras or max(32, self.max_loras)

    def named_paths(self) -> list[tuple[str, str]]:
        """Return the names and paths of ``modules``. Raises ``ValueError`` naming an option that does not work."""
        if self.modules and not self.enable:
            raise ValueError("lora_modules needs enable_lora")
        if self.max_loaded < self.max_loras:
            raise ValueError(f"max_cpu_loras is {self.max_loaded}; it must be at least max_loras, {self.max_loras}")
        return list(_read_modules(",".join(self.modules)))


def _read_modules(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and paths from ``name=path`` or vLLM's JSON objects with ``name`` and ``path``, joined by commas."""
    while text:
        if text.startswith("{"):
            try:
                module, end = json.JSONDecoder().raw_decode(text)
            except ValueError as error:
                raise ValueError(f"lora_modules: not JSON: {error}") from None
            item, text = text[:end], text[end:].lstrip(", ")
            name, path = str(module.get("name", "")), str(module.get("path", ""))
        else:
            item, _, text = text.partition(",")
            name, _, path = item.partition("=")
        if not path or "," in path:
            raise ValueError(f'lora_modules: {item!r} must be name=path or {{"name": …, "path": …}}, without commas')
        try:
            yield check_adapter_name(name, "lora_modules: the name"), path
        except InvalidArgument as error:
            raise ValueError(error.message) from None


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
    """Return the largest rank that an adapter's configuration states. Raises ``ValueError`` naming a rank that is not
    from 1 to ``max_rank``, or a pattern that is not one."""
    patterns = _patterns(config, "rank_pattern")
    _patterns(config, "alpha_pattern")
    for key, rank in (("r", config.get("r")), *((f"rank_pattern {each!r}", rank) for each, rank in patterns.items())):
        if type(rank) is not int or not 1 <= rank <= max_rank:
            raise ValueError(
                f"{key} is {rank!r}; this engine loads adapters of ranks from 1 to {max_rank} (--max-lora-rank)"
            )
    largest: int = max(config["r"], *patterns.values(), 0)
    return largest


def pattern_value(config: Mapping[str, Any], key: str, layer: str, default: Any) -> Any:
    """Return what the first pattern of the entry ``key`` that fits the name of a layer says; otherwise ``default``.
    :func:`read_rank` has checked the patterns."""
    # As peft: the expression fits the whole name, or what follows a dot in it.
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} must be an object of regular expressions, not {patterns!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from None
    return patterns
