"""Reads for how long clients want a prompt kept in the cache: ``cache_control`` of Anthropic's API, and
``prompt_cache_options`` with ``prompt_cache_breakpoint`` of OpenAI's.

A KV cache keeps whole prompts, the end of each for a shorter time than its beginning. So of several marks the longest
lifetime counts, and the place of a mark does not.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tokenloom.request.errors import InvalidArgument

_ANTHROPIC: Final = {"5m": 300, "1h": 3600}
_OPENAI: Final = {"30m": 1800, "12h": 43_200}
MAX_MARKS: Final = 4
"""Marks of one message request, as in Anthropic's API."""
OPTIONS: Final = "prompt_cache_options"
BREAKPOINT: Final = "prompt_cache_breakpoint"
Blocks = tuple[str, object]
"""Where blocks stand in a body, and a list of them or anything else."""


def anthropic_lifetimes(whole: Mapping[str, Any] | None, blocks: Iterable[Blocks]) -> list[int]:
    """Return the seconds of each mark of a message request. ``whole``: its own ``cache_control``. Raises
    ``InvalidArgument`` naming the mark."""
    marks = [] if whole is None else [("cache_control", whole)]
    for where, items in blocks:
        marks += _marks("cache_control", where, items)
    if len(marks) > MAX_MARKS:
        message = f"{marks[MAX_MARKS][0]} is one of {len(marks)} marks; at most {MAX_MARKS} are allowed"
        raise InvalidArgument(message, marks[MAX_MARKS][0])
    for where, mark in marks:
        if not isinstance(mark, Mapping) or mark.get("type") != "ephemeral":
            raise InvalidArgument(f'{where} must be {{"type": "ephemeral"}}', where)
    return [_seconds(where, mark, _ANTHROPIC, "5m") for where, mark in marks]


def openai_seconds(options: Mapping[str, Any] | None, parts: Iterable[Blocks]) -> int:
    """Return how long OpenAI's API would keep a prompt at least; 0: no options and no breakpoint ask for that, or the
    mode is explicit and there is no breakpoint. Raises ``InvalidArgument`` naming the member."""
    whole = options or {}
    if (mode := whole.get("mode", "implicit")) not in ("implicit", "explicit"):
        raise InvalidArgument(f"{OPTIONS}.mode must be implicit or explicit", f"{OPTIONS}.mode")
    default = whole.get("ttl") or "30m"
    marks = [mark for where, items in parts for mark in _marks(BREAKPOINT, where, items)]
    seconds = [_seconds(OPTIONS, whole, _OPENAI, default)]
    if mode == "explicit" or (options is None and not marks):
        seconds = []
    for where, mark in marks:
        if not isinstance(mark, Mapping) or mark.get("mode") != "explicit":
            raise InvalidArgument(f'{where} must be {{"mode": "explicit"}}', where)
        seconds.append(_seconds(where, mark, _OPENAI, default))
    return max(seconds, default=0)


def comparison(options: Mapping[str, Any] | None) -> str | None:
    """Return the id of the response with which ``prompt_cache_options`` compare this one; None: with none. Raises
    ``InvalidArgument``."""
    name = None if options is None else options.get("comparison_response_id")
    if name is not None and not isinstance(name, str):
        where = f"{OPTIONS}.comparison_response_id"
        raise InvalidArgument(f"{where} must be a string or null", where)
    return name


def _marks(member: str, where: str, blocks: object) -> Iterator[tuple[str, Any]]:
    for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if isinstance(block, Mapping) and (mark := block.get(member)) is not None:
            yield f"{where}[{index}].{member}", mark


def _seconds(where: str, mark: Mapping[str, Any], lifetimes: Mapping[str, int], default: str) -> int:
    found = lifetimes.get(str(mark.get("ttl") or default))
    if found is None:
        raise InvalidArgument(f"{where}.ttl must be {' or '.join(lifetimes)}", f"{where}.ttl")
    return found
