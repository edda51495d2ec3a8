"""The rule that chooses an engine for a leg, without the services that apply it."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.runtime.placement.engine_columns import EngineColumns
from tokenloom.services.runtime.placement.fingerprint_kinds import FingerprintKinds
from tokenloom.services.runtime.placement.pairing import choose, missing_role
from tokenloom.services.runtime.placement.pool import make_pool
from tokenloom.services.runtime.placement.rules import Ask, score
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE

roles = st.sampled_from([BOTH, PREFILL, DECODE])
PROMPT_TOKENS = 500


@dataclass(frozen=True)
class Engine:
    role: EngineRole
    kv_layout: str
    waiting: int
    uncached_tokens: int


engines = st.builds(
    Engine, roles, st.sampled_from("ab"), waiting=st.integers(0, 3), uncached_tokens=st.sampled_from([5, PROMPT_TOKENS])
)


def chosen_of(fleet: list[Engine], leg: EngineRole, threshold: int) -> tuple[Engine, bool]:
    columns, kinds = EngineColumns(), FingerprintKinds()
    for engine in fleet:
        row = columns.add()
        columns.kind[row] = kinds.number(Fingerprint(kv_layout=engine.kv_layout))
        columns.role[row], columns.waiting[row] = engine.role, engine.waiting
        columns.free_tokens[row], columns.is_serving[row] = 10_000, True
    cached = np.zeros(columns.capacity, np.int64)
    cached[: len(fleet)] = [PROMPT_TOKENS - engine.uncached_tokens for engine in fleet]
    pool = make_pool(columns, kinds, columns.serving(np.ones(len(kinds), np.bool_)))
    row, whole = choose(columns, pool, Ask(leg, PROMPT_TOKENS, cached), score, threshold)
    return fleet[row], whole


@given(st.lists(engines, min_size=1, max_size=5), roles, st.sampled_from([0, 128]))
def test_a_leg_goes_to_an_engine_that_can_run_it(fleet: list[Engine], leg: EngineRole, threshold: int) -> None:
    chosen, whole = chosen_of(fleet, leg, threshold)
    decoders = [each for each in fleet if each.role != PREFILL]
    if leg == DECODE:
        assert not whole
        assert chosen.role != PREFILL or not decoders
        return
    if leg == BOTH:
        assert whole
        assert chosen.role != PREFILL or not decoders
    elif not whole:
        assert chosen.role != DECODE
        others = [each for each in decoders if each is not chosen]
        assert any(each.kv_layout == chosen.kv_layout for each in others), "another engine can read its KV"
        assert min(each.uncached_tokens for each in decoders) >= threshold or len(decoders) > 1
    elif chosen.role == PREFILL:
        assert not any(each.kv_layout == chosen.kv_layout for each in decoders)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([], None),
        ([BOTH], None),
        ([PREFILL], DECODE),
        ([DECODE], PREFILL),
        ([PREFILL, DECODE], None),
        ([PREFILL, BOTH], None),
    ],
)
def test_which_role_is_missing(present: list[EngineRole], missing: EngineRole | None) -> None:
    assert missing_role(present) == missing
