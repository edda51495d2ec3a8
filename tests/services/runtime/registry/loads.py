"""Makes rows of loads."""

from tokenloom.services.runtime.registry.engine_loads import EngineLoad
from tokenloom.v1.coordinator_pb2 import EngineEntry


def load_of(entry: EngineEntry) -> EngineLoad:
    """The row that says what an entry says."""
    age = entry.age.ToMilliseconds()
    return EngineLoad(entry.number, age, entry.score, entry.waiting, entry.waiting_tokens, entry.report)
