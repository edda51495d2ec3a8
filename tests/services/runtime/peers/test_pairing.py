"""The rule that chooses an engine for a leg, without the services that apply it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.runtime.peers.pairing import Candidate, choose, missing_role
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE

roles = st.sampled_from([BOTH, PREFILL, DECODE])


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate[int]]:
    count = draw(st.integers(1, 5))
    return [
        Candidate(
            engine=index,
            role=draw(roles),
            fingerprint=Fingerprint(kv_layout=draw(st.sampled_from(["a", "b"]))),
            rank=(draw(st.integers(0, 3)), index),
            uncached_tokens=draw(st.sampled_from([5, 500])),
        )
        for index in range(count)
    ]


@given(candidates(), roles, st.sampled_from([0, 128]))
def test_a_leg_goes_to_an_engine_that_can_run_it(fleet: list[Candidate[int]], leg: EngineRole, threshold: int) -> None:
    index, whole = choose(fleet, leg, threshold)
    chosen = fleet[index]
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
        assert any(each.fingerprint == chosen.fingerprint for each in others), "somebody can read its KV"
        assert min(each.uncached_tokens for each in decoders) >= threshold or len(decoders) > 1
    elif chosen.role == PREFILL:
        assert not any(each.fingerprint == chosen.fingerprint for each in decoders)


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
