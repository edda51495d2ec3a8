"""Engines with other weights under one name: those that came first serve, the others wait aside."""

import logging
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.coordinator.engines.test_engine_registry import Clock
from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import Unavailable
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_DEAD,
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_PAUSED,
    ENGINE_STATE_SERVING,
    ENGINE_STATE_STARTING,
    EngineIdentity,
    EngineReport,
    PickRequest,
)
from tokenloom.v1.types_pb2 import EngineRole, FallBack, Fingerprint

BOTH = EngineRole.ENGINE_ROLE_BOTH
OP = Fingerprint(model="m", tokenizer=b"t")
"""What an output processor asks for: it knows no weights."""
ENTITLED = (ENGINE_STATE_STARTING, ENGINE_STATE_SERVING, ENGINE_STATE_PAUSED)


def identity(name: str, weights: bytes, tokenizer: bytes = b"t") -> EngineIdentity:
    fingerprint = Fingerprint(model="m", weights=weights, tokenizer=tokenizer, block_size=16)
    return EngineIdentity(engine_id=name, epoch=1, address=name, num_kv_blocks=64, fingerprint=fingerprint)


def report(**fields: Any) -> EngineReport:
    return EngineReport(**{"role": BOTH, "state": ENGINE_STATE_SERVING, "free_kv_blocks": 64, **fields})


class Fleet:
    """A registry, and the engines that joined it."""

    def __init__(self, settle_seconds: float = 0.0) -> None:
        self.clock = Clock()
        self.fall_backs = FallBacks()
        self.registry = Registry(
            1, self.clock, policy=DEFAULT_POLICY, settle_seconds=settle_seconds, fall_backs=self.fall_backs
        )
        self.records: dict[str, EngineRecord] = {}

    def join(self, name: str, weights: bytes, tokenizer: bytes = b"t", **fields: Any) -> None:
        self.records[name] = self.registry.join(identity(name, weights, tokenizer), report(**fields))

    def report(self, name: str, **fields: Any) -> None:
        self.registry.report(self.records[name], report(**fields))

    def leave(self, name: str) -> None:
        self.registry.leave(self.records.pop(name))

    def picked(self, asked: Fingerprint = OP) -> set[str]:
        """Engines that requests get, without any: none serves."""
        request = PickRequest(fingerprint=asked, role=BOTH, prompt_tokens=3)
        found = set()
        for _ in range(2 * len(self.records)):
            try:
                placed = self.registry.pick(request)
            except Unavailable:
                break
            found.add(placed.engine.engine_id)
            record = self.records[placed.engine.engine_id]
            arrived = EngineReport()
            arrived.CopyFrom(record.report)
            del arrived.picks_arrived[:]
            arrived.picks_arrived.append(placed.pick)
            self.registry.report(record, arrived)  # no load remains
        return found

    def shown(self) -> dict[str, tuple[int, list[str]]]:
        """State and fall-backs of each engine, as watchers see them."""
        engines = snapshot_of(self.registry).engines
        return {e.identity.engine_id: (e.report.state, [f.kind for f in e.report.fall_backs]) for e in engines}


def test_an_engine_with_other_weights_waits_aside_until_the_first_ones_have_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    fleet.join("a", b"one")
    assert fleet.picked() == {"a"}
    with caplog.at_level(logging.WARNING):
        fleet.join("b", b"two")
        assert fleet.picked() == {"a"}
    (record,) = caplog.records
    assert "fall-back other_weights of b: " in record.message
    assert "weights is 74776f, expected 6f6e65 as engine a serves 'm'" in record.message
    assert fleet.shown() == {"a": (ENGINE_STATE_SERVING, []), "b": (ENGINE_STATE_PAUSED, ["other_weights"])}
    assert fleet.registry.claims.unannounced["b"].startswith("weights is 74776f")
    assert fleet.fall_backs.counts == {"other_weights": 1}
    fleet.leave("a")
    assert fleet.picked() == {"b"}
    assert fleet.shown() == {"b": (ENGINE_STATE_SERVING, [])}
    assert fleet.registry.claims.unannounced == {"b": ""}
    assert not fleet.fall_backs.active


@pytest.mark.parametrize(("first", "second"), [(b"", b"two"), (b"one", b"")])
def test_weights_that_are_not_known_are_no_wildcard(first: bytes, second: bytes) -> None:
    """So an engine of a release that did not say its weights waits aside, or lets others wait."""
    fleet = Fleet()
    fleet.join("a", first)
    fleet.join("b", second)
    assert fleet.picked() == {"a"}


def test_weights_that_are_rounded_at_load_are_other_weights_and_other_last_bits_are_not() -> None:
    fleet = Fleet()
    for name, numerics in (("a", "cpu/bfloat16/torch-2"), ("b", "cpu/bfloat16/int8/torch-2"), ("c", "cpu/amx/torch-3")):
        described = identity(name, b"one")
        described.fingerprint.numerics = numerics
        fleet.records[name] = fleet.registry.join(described, report())
    assert fleet.picked() == {"a", "c"}
    (aside,) = fleet.fall_backs.active
    assert "numerics is 'cpu/bfloat16/int8/torch-2', expected 'cpu/bfloat16/torch-2'" in aside.detail


def test_equal_weights_and_none_at_all_serve_together() -> None:
    for weights in (b"one", b""):
        fleet = Fleet()
        fleet.join("a", weights)
        fleet.join("b", weights)
        assert fleet.picked() == {"a", "b"}
        assert not fleet.registry.claims.unannounced


def test_another_tokenizer_is_another_pool() -> None:
    """Output processors and gateways with that tokenizer serve it: nothing has to wait."""
    fleet = Fleet()
    fleet.join("a", b"one")
    fleet.join("b", b"two", tokenizer=b"u")
    assert fleet.picked() == {"a"}
    assert fleet.picked(Fingerprint(model="m", tokenizer=b"u")) == {"b"}
    assert not fleet.fall_backs.active


def test_a_request_goes_on_with_its_weights_while_they_wait_aside() -> None:
    fleet = Fleet()
    fleet.join("a", b"one")
    fleet.join("b", b"two")
    assert fleet.picked(fleet.records["b"].identity.fingerprint) == {"b"}


@pytest.mark.parametrize("state", [ENGINE_STATE_DRAINING, ENGINE_STATE_DEAD])
def test_the_name_goes_to_those_aside_when_the_others_only_end(state: int) -> None:
    fleet = Fleet()
    fleet.join("a", b"one")
    fleet.join("b", b"two")
    fleet.report("a", state=state)
    assert fleet.picked() == {"b"}
    fleet.report("a")
    assert fleet.picked() == {"b"}, "the first one is second now"
    assert fleet.shown()["a"] == (ENGINE_STATE_PAUSED, ["other_weights"])


def test_a_paused_engine_keeps_the_name() -> None:
    fleet = Fleet()
    fleet.join("a", b"one")
    fleet.join("b", b"two")
    fleet.report("a", state=ENGINE_STATE_PAUSED)
    assert not fleet.picked()
    fleet.report("a")
    assert fleet.picked() == {"a"}


def test_engines_reloaded_one_after_the_other_change_the_weights_together() -> None:
    fleet = Fleet()
    for name in "abc":
        fleet.join(name, b"one")
    for name, serving in (("a", {"b", "c"}), ("b", {"c"}), ("c", {"a", "b", "c"})):
        fleet.join(name, b"two")
        assert fleet.picked() == serving


def test_those_that_waited_aside_give_way_at_a_new_coordinator() -> None:
    fleet = Fleet(settle_seconds=2.0)
    fleet.join("b", b"two", fall_backs=[FallBack(kind="other_weights", detail="x")])
    assert not fleet.picked(), "the engines of the former coordinator are not back yet"
    fleet.join("a", b"one")
    assert fleet.picked() == {"a"}
    fleet.clock.now += 3.0
    fleet.registry.refresh()
    assert fleet.picked() == {"a"}
    assert fleet.registry.claims.unannounced["b"].startswith("weights is 74776f")


def test_those_that_waited_aside_serve_if_no_other_comes_back() -> None:
    fleet = Fleet(settle_seconds=2.0)
    fleet.join("b", b"two", fall_backs=[FallBack(kind="other_weights", detail="x")])
    fleet.clock.now += 3.0
    fleet.registry.refresh()
    assert fleet.picked() == {"b"}
    assert fleet.registry.claims.unannounced == {"b": ""}


class ClaimsMachine(RuleBasedStateMachine):
    """Whatever joins, leaves and changes its state: requests get engines of one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.engines: dict[str, tuple[bytes, int]] = {}
        self.holder: bytes | None = None

    @rule(name=st.sampled_from("abcd"), weights=st.sampled_from([b"", b"one", b"two"]))
    def join(self, name: str, weights: bytes) -> None:
        self.fleet.join(name, weights)
        self.engines[name] = weights, ENGINE_STATE_SERVING

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.fleet.leave(name)
        del self.engines[name]

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        state=st.sampled_from(
            [ENGINE_STATE_SERVING, ENGINE_STATE_PAUSED, ENGINE_STATE_DRAINING, ENGINE_STATE_DEAD, ENGINE_STATE_STARTING]
        ),
    )
    def report(self, data: st.DataObject, state: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.fleet.report(name, state=state)
        self.engines[name] = self.engines[name][0], state

    @invariant()
    def one_set_of_weights_serves(self) -> None:
        picked = self.fleet.picked()
        serving = {name: weights for name, (weights, state) in self.engines.items() if state == ENGINE_STATE_SERVING}
        assert len({self.engines[name][0] for name in picked}) <= 1
        entitled = {weights for weights, state in self.engines.values() if state in ENTITLED}
        if self.holder not in entitled:
            self.holder = next(iter({self.engines[name][0] for name in picked}), None)
        if self.holder is not None and self.holder in entitled:
            assert picked == {name for name, weights in serving.items() if weights == self.holder}
        aside = {name for name, (_, kinds) in self.fleet.shown().items() if kinds}
        assert not aside & picked
        assert set(serving) - picked <= aside
        assert self.fleet.registry.claims.num_aside == len(aside)


TestClaimsMachine = ClaimsMachine.TestCase
TestClaimsMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
