"""Makes columns of loads."""

from tokenloom.services.runtime.registry.engine_loads import loads_of
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineLoads


def load_of(entry: EngineEntry) -> EngineLoads:
    """One row that says what an entry says."""
    return loads_of(
        [entry.report],
        number=[entry.number],
        age_milliseconds=[entry.age.ToMilliseconds()],
        score=[entry.score],
        waiting=[entry.waiting],
        waiting_tokens=[entry.waiting_tokens],
        uncached_tokens=[entry.uncached_tokens],
        uncached_tokens_per_second=[entry.uncached_tokens_per_second],
        expected_seconds=[entry.expected_seconds],
    )
