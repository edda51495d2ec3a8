"""An idle mesh occupies little: ``python -m tests.e2e.footprint`` prints how much."""

from typing import Any

from tests.e2e.footprint import MOST_BYTES, MOST_THREADS, footprints, table, total_bytes

GRPC = "event_engine"
"""gRPC starts from 4 to 16 of these threads in a process, as many as the machine has cores."""
SERVICES = 5
TOLERANCE = 1.1
"""Another version of Python or torch takes more, or less."""


def test_an_idle_mesh_is_small_and_has_few_threads(serve: Any) -> None:
    served = serve("--num-threads", "2")
    found = footprints(served.family())
    assert len(found) >= SERVICES + 2, table(found)
    threads = sum(each.threads.total() - each.threads[GRPC] for each in found)
    assert threads <= MOST_THREADS - 4 * SERVICES, table(found)
    assert total_bytes(found) <= TOLERANCE * MOST_BYTES, table(found)
    assert sum(GRPC in each.threads for each in found) == SERVICES, f"only services speak gRPC\n{table(found)}"
