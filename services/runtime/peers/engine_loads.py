"""Carries the loads of engines as columns: what a snapshot's change holds of engines of which nothing else changed."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineLoads, EngineReport

_OF_ENTRY = (("score", "score"), ("waiting", "waiting"), ("waiting_tokens", "waiting_tokens"))
"""Columns, each with the field of ``EngineEntry`` that it carries."""
_OF_REPORT = (
    ("reported_waiting", "waiting"),
    ("running", "running"),
    ("reported_waiting_tokens", "waiting_tokens"),
    ("kv_usage", "kv_usage"),
    ("free_kv_blocks", "free_kv_blocks"),
    ("seats", "seats"),
    ("prefill_tokens_per_second", "prefill_tokens_per_second"),
    ("starts_per_second", "starts_per_second"),
    ("prompt_tokens_per_second", "prompt_tokens_per_second"),
    ("step_seconds", "step_seconds"),
    ("step_requests", "step_requests"),
)
"""Columns, each with the field of ``EngineReport`` that it carries."""
_GETTERS = [
    ("number", attrgetter("number")),
    *((column, attrgetter(field)) for column, field in _OF_ENTRY),
    *((column, attrgetter("report." + field)) for column, field in _OF_REPORT),
]


def loads_of(entries: Sequence[EngineEntry]) -> EngineLoads:
    """Return the loads of engines, a row for each."""
    loads = EngineLoads(age_milliseconds=[entry.age.ToMilliseconds() for entry in entries])
    for column, get in _GETTERS:
        getattr(loads, column).extend(map(get, entries))
    return loads


def set_load(entry: EngineEntry, loads: EngineLoads, row: int) -> None:
    """Give an engine the load of one row. A column that a coordinator of another release does not send is left out."""
    if row < len(loads.age_milliseconds):
        entry.age.FromMilliseconds(loads.age_milliseconds[row])
    _set(entry, _OF_ENTRY, loads, row)
    _set(entry.report, _OF_REPORT, loads, row)


def clear_load(entry: EngineEntry) -> None:
    """Remove what :func:`loads_of` carries, except the number: what remains differs if more than the load differs."""
    entry.ClearField("age")
    for _, field in _OF_ENTRY:
        entry.ClearField(field)
    report = entry.report
    for _, field in _OF_REPORT:
        report.ClearField(field)


def _set(message: EngineEntry | EngineReport, fields: Iterable[tuple[str, str]], loads: EngineLoads, row: int) -> None:
    for column, field in fields:
        if row < len(values := getattr(loads, column)):
            setattr(message, field, values[row])
