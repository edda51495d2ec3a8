"""Options of LoRA adapters; describes them, between worker and core and between core and client, and reads their files,
which are in the layout of the peft library."""

import enum
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from re import _compiler, _parser  # type: ignore[attr-defined]
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG}: must be a JSON object")
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(weights)
    return AdapterFiles(config, weights, digest.digest())


class AdapterSize(NamedTuple):
    """Says what an adapter's files show before they are read."""

    nbytes: int
    """Of the weights; 0: there are none, and loading the adapter says so."""
    keeps_files: bool
    """Whether it depends on the model's own weights, so that it is made again when they change."""
    has_layers: bool
    """Whether it has whole layers, which take the place of the model's."""


def adapter_size(path: Path) -> AdapterSize:
    """Return the size of the adapter in the directory ``path``, whatever is wrong with its files."""
    try:
        nbytes = (path / WEIGHTS).stat().st_size
        config = msgspec.json.decode((path / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return AdapterSize(0, keeps_files=False, has_layers=False)
    has_layers = bool(config.get("modules_to_save"))
    keeps_files = has_layers or bool(config.get("use_dora")) or config.get("bias", "none") != "none"
    return AdapterSize(nbytes, keeps_files, has_layers)


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
    :func:`read_rank` has checked the patterns. Raises ``ValueError`` for one that takes too long."""
    for pattern, value in (config.get(key) or {}).items():
        if _fits(pattern, layer):
            return value
    return default


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} must be an object of regular expressions, not {patterns!r}")
    for pattern in patterns:
        try:
            _compiler.compile(_whole(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from None
    return patterns


def _whole(pattern: str) -> str:
    """Return the expression that peft matches: of the whole name, or of what follows a dot in it."""
    return rf"(.*\.)?({pattern})$"


_MOST_STEPS = 1 << 18


def _fits(pattern: str, layer: str) -> bool:
    # Adapters come from strangers, and Python tries the ways to match one after the other: those of (a+)+b are 2^n.
    # The regex package has a time limit for that, but ((.?){9999}){9999} takes more than 3 GB before the limit counts.
    # Where a pattern has no choice that could multiply, Python is the faster one.
    if not set("*+?{|(") & set(pattern):
        return re.match(_whole(pattern), layer) is not None
    try:
        return _Match(_Expression.of(_whole(pattern)), layer).is_found
    except (_TooHard, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} {error}") from None


class _TooHard(Exception):
    """An expression has what :class:`_Match` does not match, or takes too many steps."""


class _Expression:
    """A parsed expression.

    Attributes:
        items: Its parts, which follow each other.
    """

    def __init__(self, expression: str) -> None:
        self.items = _parser.parse(expression)
        self._compiled: dict[int, re.Pattern[str]] = {}
        """By the identity of the part."""

    @classmethod
    @functools.lru_cache(64)
    def of(cls, expression: str) -> "_Expression":
        """Return the one that was made before, or make it."""
        return cls(expression)

    def compiled(self, item: tuple[Any, Any]) -> re.Pattern[str]:
        """Return a part that fits a character or a place, as an expression of its own."""
        if id(item) not in self._compiled:
            self._compiled[id(item)] = _compiler.compile(_parser.SubPattern(self.items.state, [item]))
        return self._compiled[id(item)]


class _Match:
    """Matches the begin of a text with an expression, all ways at a time: its time grows with the sizes of both, and
    not with the number of ways. It has no groups to refer to."""

    def __init__(self, expression: _Expression, text: str) -> None:
        """Raises :class:`_TooHard`."""
        self._expression, self._text, self._left = expression, text, _MOST_STEPS
        self.is_found = bool(self._ends(expression.items, {0}))

    def _ends(self, items: Iterable[tuple[Any, Any]], starts: set[int]) -> set[int]:
        """Return where matches of ``items`` end that begin at ``starts``."""
        for item in items:
            if not starts:
                break
            self._left -= len(starts)
            if self._left < 0:
                raise _TooHard("takes too many steps to match")
            starts = self._ends_of(item, starts)
        return starts

    def _ends_of(self, item: tuple[Any, Any], starts: set[int]) -> set[int]:
        kind, found = str(item[0]), item[1]
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN" | "AT":
                one = self._expression.compiled(item)
                return {match.end() for start in starts if (match := one.match(self._text, start))}
            case "BRANCH":
                return set[int]().union(*(self._ends(each, starts) for each in found[1]))
            case "SUBPATTERN" if not found[1] and not found[2]:
                return self._ends(found[3], starts)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = found
                return self._repeated(least, most, items, starts)
            case "ASSERT" | "ASSERT_NOT" if found[0] > 0:
                return {start for start in starts if bool(self._ends(found[1], {start})) == (kind == "ASSERT")}
        raise _TooHard(f"has {kind.lower()}, which is not supported")

    def _repeated(self, least: int, most: int, items: Iterable[tuple[Any, Any]], starts: set[int]) -> set[int]:
        for _ in range(least):
            before, starts = starts, self._ends(items, starts)
            if starts == before:  # so it is after any number of times
                break
        found = set(starts)
        for _ in range(least, most):
            starts = self._ends(items, starts) - found
            if not starts:
                break
            found |= starts
        return found
