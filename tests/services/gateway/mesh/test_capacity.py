"""What the serving engines can do together."""

from tokenloom.services.gateway.mesh.mesh_view import Capacity
from tokenloom.v1.coordinator_pb2 import EngineEntry, EngineReport
from tokenloom.v1.types_pb2 import EngineRole

BOTH, PREFILL, DECODE = (
    EngineRole.ENGINE_ROLE_BOTH,
    EngineRole.ENGINE_ROLE_PREFILL,
    EngineRole.ENGINE_ROLE_DECODE,
)


def engine(role: EngineRole, *, prefill: float = 0.0, starts: float = 0.0, tokens: int = 0) -> EngineEntry:
    report = EngineReport(
        role=role, running=3, waiting=1, seats=8, prefill_tokens_per_second=prefill, starts_per_second=starts
    )
    return EngineEntry(report=report, waiting=2, waiting_tokens=tokens)  # one waiting request is still on its way


def test_engines_add_up() -> None:
    assert Capacity.of([engine(BOTH, prefill=100, starts=2, tokens=50), engine(BOTH, prefill=50, starts=1)]) == (
        Capacity(seats=16, prefill_tokens_per_second=150, starts_per_second=3, live=10, waiting_tokens=50)
    )


def test_an_engine_that_was_not_measured_counts_like_the_others() -> None:
    capacity = Capacity.of([engine(BOTH, prefill=100), engine(BOTH), engine(BOTH, prefill=50)])
    assert (capacity.prefill_tokens_per_second, capacity.starts_per_second) == (225, 0)


def test_each_role_counts_for_its_work() -> None:
    pair = [engine(PREFILL, prefill=100, starts=9, tokens=40), engine(DECODE, prefill=5, starts=2, tokens=30)]
    assert Capacity.of(pair) == Capacity(8, 100, 2, live=10, waiting_tokens=40)
    assert Capacity.of(pair[:1]) == Capacity(8, 100, 9, live=5, waiting_tokens=40)
    assert Capacity.of(pair[1:]) == Capacity(8, 5, 2, live=5, waiting_tokens=30)


def test_a_load_that_is_not_known_is_none() -> None:
    assert Capacity(8, 100, 2, live=10, waiting_tokens=40).without_load() == Capacity(8, 100, 2)
