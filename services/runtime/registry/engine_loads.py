"""Carries the loads of engines as columns: what a snapshot's change holds of engines of which nothing else changed."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineLoads, EngineReport

_OF_ENTRY = tuple(
    (name, name)
    for name in (
        "score",
        "waiting",
        "waiting_tokens",
        "uncached_tokens",
        "uncached_tokens_per_second",
        "expected_seconds",
    )
)
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
_GETTERS = [(column, attrgetter(field)) for column, field in _OF_REPORT]


_COLUMNS = ("age_milliseconds", *(column for column, _ in (*_OF_ENTRY, *_OF_REPORT)))


def fit_together(loads: EngineLoads) -> bool:
    """Return whether every column has a row for each engine, or none."""
    lengths = {0, len(loads.number)}
    return all(len(getattr(loads, column)) in lengths for column in _COLUMNS)


def loads_of(reports: Sequence[EngineReport], **columns: Sequence[float]) -> EngineLoads:
    """Return the loads of engines, a row for each. ``columns``: those that are not read from the reports."""
    loads = EngineLoads(**columns)  # type: ignore[arg-type]  # whole numbers where the column has them
    for column, get in _GETTERS:
        getattr(loads, column).extend(map(get, reports))
    return loads


def set_loads(entries: Sequence[EngineEntry], loads: EngineLoads, rows: Sequence[int]) -> None:
    """Give each engine the load of its row. A column that a coordinator of another release lacks is left out."""
    if loads.age_milliseconds:
        for entry, row in zip(entries, rows, strict=True):
            entry.age.FromMilliseconds(loads.age_milliseconds[row])
    _set(entries, _OF_ENTRY, loads, rows)
    _set([entry.report for entry in entries], _OF_REPORT, loads, rows)


def clear_load(entry: EngineEntry) -> None:
    """Remove what :func:`loads_of` carries, except the number: what remains differs if more than the load differs."""
    entry.ClearField("age")
    for _, field in _OF_ENTRY:
        entry.ClearField(field)
    report = entry.report
    for _, field in _OF_REPORT:
        report.ClearField(field)


def _set(
    messages: Sequence[EngineEntry | EngineReport],
    fields: Iterable[tuple[str, str]],
    loads: EngineLoads,
    rows: Sequence[int],
) -> None:
    for column, field in fields:
        if values := list(getattr(loads, column)):
            for message, row in zip(messages, rows, strict=True):
                setattr(message, field, values[row])
