"""Which engines a prefix names."""

import numpy as np

from tokenloom.services.runtime.placement import prefix_homes
from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds
from tokenloom.services.runtime.placement.pool import Pool, make_pool
from tokenloom.services.runtime.placement.prefix_homes import NUM_HOMES, name_hash
from tokenloom.services.runtime.placement.rules import Ask
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH = EngineRole.ENGINE_ROLE_BOTH


def fleet(count: int) -> tuple[EngineColumns, Pool]:
    columns, kinds = EngineColumns(), FingerprintKinds()
    for index in range(count):
        row = columns.add()
        columns.kind[row] = kinds.number(Fingerprint(model="m"))
        columns.role[row], columns.is_serving[row] = BOTH, True
        columns.name_hash[row] = name_hash(f"engine-{index}")
    return columns, make_pool(columns, kinds, np.arange(count))


def test_the_coordinator_prefers_the_homes_that_output_processors_know() -> None:
    columns, pool = fleet(20)
    for prompt in range(50):
        hashes = [1000 * prompt + block for block in range(20)]
        homes = set(prefix_homes.homes_of(columns, pool, hashes))
        assert len(homes) == NUM_HOMES
        chosen = prefix_homes.rule(tuple(prefix_homes.keys_of(hashes)), np.zeros(columns.capacity))
        assert int(chosen(columns, pool.engines, Ask(BOTH, 320)).argmin()) in homes
        assert set(prefix_homes.homes_of(columns, pool, hashes)) == homes


def test_without_hashes_or_with_few_engines_nothing_is_preferred() -> None:
    columns, pool = fleet(NUM_HOMES)
    assert not prefix_homes.homes_of(columns, pool, [1, 2])
    columns, pool = fleet(20)
    assert not prefix_homes.homes_of(columns, pool, [])


def test_of_a_pool_a_bounded_number_of_prefixes_is_remembered() -> None:
    columns, pool = fleet(4)
    for prompt in range(prefix_homes.MAX_KEYS + 10):
        prefix_homes.homes_of(columns, pool, [prompt])
    assert len(pool.homes) <= prefix_homes.MAX_KEYS
