"""A nixl agent exists, and works, only while it is needed."""

import os
from collections.abc import Iterator

import pytest

from tests.gpu_worker.kv_connector.conftest import LAYOUT, MakePool, blocks
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.gpu_worker.kv_connector.nixl import NixlTransport

pytestmark = pytest.mark.skipif(not nixl.is_available(), reason="nixl is not installed")


@pytest.fixture
def transports() -> Iterator[tuple[NixlTransport, NixlTransport]]:
    made = NixlTransport(), NixlTransport()
    yield made
    for transport in made:
        transport.close()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_no_agent_is_made_before_a_reader_asks(transports: tuple[NixlTransport, NixlTransport]) -> None:
    before = num_threads()  # the fixture has loaded the library; every agent has a thread
    transport = NixlTransport()
    assert transport.serves_on_demand
    transport.close()
    assert num_threads() == before


def test_a_transfer_ends_while_the_owner_attends(
    transports: tuple[NixlTransport, NixlTransport], make_pool: MakePool
) -> None:
    owner, reader = transports
    source, target = make_pool(8, shared=True, seed=1), make_pool(8, seed=2)
    endpoint = owner.serve(source)
    assert endpoint is not None
    for _ in range(2):  # the second time the attendant is woken
        owner.attend(60)
        reader.open(endpoint, LAYOUT).read(range(8), range(8), target)
        assert blocks(target) == blocks(source)
        owner.attend(0)


def test_an_owner_is_dropped_with_its_last_reader(
    transports: tuple[NixlTransport, NixlTransport], make_pool: MakePool
) -> None:
    """Each restart of an owner has another agent, whose metadata and connections would stay for ever."""
    owner, reader = transports
    endpoint = owner.serve(make_pool(8, shared=True, seed=1))
    assert endpoint is not None
    target = make_pool(8, seed=2)
    owner.attend(60)
    first, second = reader.open(endpoint, LAYOUT), reader.open(endpoint, LAYOUT)
    first.close()
    del first
    second.read(range(8), range(8), target)
    assert reader._num_readers.total() == 1
    second.close()
    del second
    assert not reader._num_readers
    reader.open(endpoint, LAYOUT).read(range(8), range(8), target)
    owner.attend(0)
