"""Which transports serve a pool, from when on, and how long their owner attends to readers."""

import pytest

from tests.engine_core.kv_transfer.kv_pair import Clock, ManualExecutor
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.kv_messages import KVAcquire, KVAnswer, KVRelease, KVRenew
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_service import LINGER_SECONDS, READ_SECONDS, Endpoints, KVService
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVReader, KVRegion, KVTransferError


class FakeTransport:
    """Records what the owner asks of it."""

    guards_bytes = True

    def __init__(self, name: str, *, serves_on_demand: bool, error: Exception | None = None) -> None:
        self.name = name
        self.serves_on_demand = serves_on_demand
        self.num_served = 0
        self.attended: list[float] = []
        self._error = error

    def serve(self, pool: KVPool) -> bytes | None:
        self.num_served += 1
        if self._error is not None:
            raise self._error
        return self.name.encode()

    def attend(self, seconds: float) -> None:
        self.attended.append(seconds)

    def open(self, endpoint: bytes, layout: str) -> KVReader:
        raise KVTransferError("transport", "not used")

    def close(self) -> None:
        pass


@pytest.fixture
def pool() -> KVPool:
    return KVPool(PoolMemory.allocate(64, shared=False), (KVRegion(0, 8),), 8, "layout")


@pytest.fixture
def eager() -> FakeTransport:
    return FakeTransport("eager", serves_on_demand=False)


@pytest.fixture
def lazy() -> FakeTransport:
    return FakeTransport("lazy", serves_on_demand=True)


def test_a_transport_on_demand_serves_from_the_first_reader_on(
    pool: KVPool, eager: FakeTransport, lazy: FakeTransport
) -> None:
    endpoints = Endpoints([eager, lazy])
    endpoints.serve(pool)
    assert (eager.num_served, lazy.num_served) == (1, 0)
    assert endpoints.names == ["eager", "lazy"]
    assert endpoints.choose(["lazy", "eager"]) == "lazy"
    assert endpoints.find("eager") == b"eager"
    assert endpoints.find("lazy") is None
    endpoints.make("lazy")
    endpoints.make("lazy")
    assert endpoints.find("lazy") == b"lazy"
    assert lazy.num_served == 1


def test_readers_of_other_transports_do_not_start_it(pool: KVPool, eager: FakeTransport, lazy: FakeTransport) -> None:
    endpoints = Endpoints([eager, lazy])
    endpoints.serve(pool)
    assert endpoints.choose(["eager", "lazy"]) == "eager"
    assert endpoints.choose(["other"]) is None
    endpoints.attend(b"a", "eager")
    endpoints.release(b"a")
    assert (lazy.num_served, eager.attended) == (0, [])


def test_a_transport_that_cannot_serve_is_not_chosen_again(pool: KVPool, eager: FakeTransport) -> None:
    broken = FakeTransport("broken", serves_on_demand=True, error=OSError("no such device"))
    endpoints = Endpoints([broken, eager])
    endpoints.serve(pool)
    endpoints.make("broken")
    assert endpoints.choose(["broken", "eager"]) == "eager"
    assert endpoints.names == ["eager"]


def test_the_owner_attends_as_long_as_the_last_reader(pool: KVPool, lazy: FakeTransport) -> None:
    clock = Clock()
    endpoints = Endpoints([lazy], clock)
    endpoints.serve(pool)
    endpoints.attend(b"a", "lazy")
    clock.now = 2.0
    endpoints.attend(b"b", "lazy")
    endpoints.release(b"b")
    clock.now = 5.0
    endpoints.renew(b"a")
    endpoints.release(b"a")
    endpoints.renew(b"unknown")
    endpoints.release(b"unknown")
    assert lazy.attended == [READ_SECONDS, READ_SECONDS, READ_SECONDS - 2.0, READ_SECONDS, LINGER_SECONDS]


def service_of(pool: KVPool, *transports: FakeTransport) -> tuple[KVService, ManualExecutor]:
    executor = ManualExecutor()
    service = KVService(KVConfig(), transports, Failpoints(), executor=executor, clock=Clock())
    service.register(pool)
    service.leases.generations = [0] * pool.num_blocks
    lease = service.leases.grant(b"lease", "request", [1, 2], 20, b"digest")
    service.leases.publish(lease, 20)
    return service, executor


def answers(service: KVService) -> list[KVAnswer]:
    service.run()
    events = service.take_events()
    assert all(isinstance(event, KVAnswer) for event in events)
    return [event for event in events if isinstance(event, KVAnswer)]


def test_acquire_is_answered_when_the_endpoint_is_made(pool: KVPool, eager: FakeTransport, lazy: FakeTransport) -> None:
    service, executor = service_of(pool, lazy, eager)
    service.receive(KVAcquire(1, b"lease", "layout", b"digest", ["lazy", "eager"]))
    assert answers(service) == []
    assert executor.run_one()
    (answer,) = answers(service)
    assert answer.target is not None
    assert (answer.call_id, answer.target.transport, answer.target.endpoint) == (1, "lazy", b"lazy")
    service.receive(KVRenew(2, answer.target.acquisition_id))
    service.receive(KVRelease(3, answer.target.acquisition_id, [0, 0]))
    assert [answer.valid for answer in answers(service)] == [False, True]
    assert lazy.attended == [READ_SECONDS, READ_SECONDS, LINGER_SECONDS]


def test_an_engine_ends_its_own_lease_without_a_transport(pool: KVPool, lazy: FakeTransport) -> None:
    """Nor does it make the endpoint of one that waits for a reader."""
    for transports in ([], [lazy]):
        service, executor = service_of(pool, *transports)
        service.receive(KVAcquire(1, b"lease", "layout", b"digest", [], is_own=True))
        (answer,) = answers(service)
        assert answer.target is not None
        service.receive(KVRelease(2, answer.target.acquisition_id, answer.target.generations))
        assert [answer.valid for answer in answers(service)] == [True]
        assert len(service.leases) == 0
        assert not executor.run_one()


def test_acquire_falls_back_to_the_next_transport(pool: KVPool, eager: FakeTransport) -> None:
    broken = FakeTransport("broken", serves_on_demand=True, error=OSError("no such device"))
    service, executor = service_of(pool, broken, eager)
    service.receive(KVAcquire(1, b"lease", "layout", b"digest", ["broken", "eager"]))
    assert executor.run_one()
    (answer,) = answers(service)
    assert answer.target is not None
    assert answer.target.transport == "eager"
    service.receive(KVAcquire(2, b"lease", "layout", b"digest", ["broken"]))
    (answer,) = answers(service)
    assert (answer.failure, answer.detail) == ("transport", "the owner serves ['eager'], not ['broken']")
