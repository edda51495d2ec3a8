"""Tests that the columns carry everything of a report that changes all the time."""

from google.protobuf.descriptor import FieldDescriptor

from tests.services.runtime.registry.loads import load_of
from tokenloom.services.runtime.registry.engine_loads import clear_load, set_loads
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineLoads, EngineReport

NUMBERS = {
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_FLOAT,
    FieldDescriptor.CPPTYPE_DOUBLE,
}
NOT_SHOWN = {"step", "computed_tokens_per_second", "prefilling_tokens", "start_wave", "wave_complete"}
"""Numbers that only the coordinator needs."""
RARELY_CHANGED = {"group_size"}
"""Numbers that change so seldom that the whole entry may come with them."""


def report() -> EngineReport:
    numbers = [field.name for field in EngineReport.DESCRIPTOR.fields if field.cpp_type in NUMBERS]
    return EngineReport(**{name: n for n, name in enumerate(numbers, 1) if name not in NOT_SHOWN | RARELY_CHANGED})


def test_every_number_of_a_report_is_a_load():
    entry = EngineEntry(report=report())
    clear_load(entry)
    assert entry == EngineEntry(report=EngineReport()), "another number would make each report more than a load"


def test_a_load_arrives_as_it_was():
    costs = {"uncached_tokens": 1 << 40, "uncached_tokens_per_second": 2000.0, "expected_seconds": 0.25}
    sent = EngineEntry(number=7, report=report(), score=9, waiting=2, waiting_tokens=1 << 40, **costs)  # type: ignore[arg-type]
    sent.age.FromMilliseconds(250)
    taken = EngineEntry(number=7, report=EngineReport())
    set_loads([taken], load_of(sent), [0])
    assert taken == sent


def test_columns_of_another_rule_leave_what_is_known():
    taken = EngineEntry(number=7, report=EngineReport(), expected_seconds=0.5)
    set_loads([taken], EngineLoads(number=[7], score=[3]), [0])
    assert (taken.score, taken.expected_seconds) == (3, 0.5)
