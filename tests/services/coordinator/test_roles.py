"""Tests how legs, roles and cached prefixes decide on the engine, and whether it does the whole request."""

import logging

import pytest

from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.placement.rules import Rule, score
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, EngineReport, EngineState, PickRequest
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
ROLES = {"b": BOTH, "p": PREFILL, "d": DECODE}
BLOCK_SIZE = 16
THRESHOLD = 128


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Engines whose names begin with their roles: p0, d0, b0..."""

    def __init__(self, *names: str, threshold: int = THRESHOLD, rule: Rule = score) -> None:
        self.clock = Clock()
        policy = Policy(pd_threshold=threshold, rule=rule)
        self.registry = Registry(7, self.clock, policy=policy)
        self.records = {name: self.registry.join(identity(name), report(name)) for name in names}

    def pick(self, leg: EngineRole = PREFILL, prompt_tokens: int = 1000, **fields: object) -> str:
        """The engine's name, with a ``*`` when it does the whole request. The pick is acknowledged: no load remains."""
        request = PickRequest(fingerprint=Fingerprint(model="m"), role=leg, prompt_tokens=prompt_tokens)
        request.MergeFrom(PickRequest(**fields))
        response = self.registry.pick(request)
        name = response.engine.engine_id
        record = self.records[name]
        acknowledged = EngineReport()
        acknowledged.CopyFrom(record.report)
        acknowledged.picks_arrived.append(response.pick)
        self.registry.report(record, acknowledged)
        return name + "*" * response.whole_request

    def load(self, name: str, waiting: int = 0, running: int = 0, **fields: object) -> None:
        self.registry.report(self.records[name], report(name, waiting=waiting, running=running, **fields))


def identity(name: str, **fingerprint: object) -> EngineIdentity:
    return EngineIdentity(
        engine_id=name,
        epoch=1,
        address=f"unix:/{name}",
        num_kv_blocks=1000,
        fingerprint=Fingerprint(**{"model": "m", "block_size": BLOCK_SIZE, **fingerprint}),
        limits=ModelLimits(max_model_len=8192, vocab_size=100),
    )


def report(name: str, **fields: object) -> EngineReport:
    state = EngineState.ENGINE_STATE_SERVING
    return EngineReport(**{"role": ROLES[name[0]], "state": state, "free_kv_blocks": 1000, **fields})


def hashes(prompt_tokens: int, seed: int = 1) -> list[int]:
    return [seed << 32 | index for index in range(min(prompt_tokens // BLOCK_SIZE, MAX_HASHES))]


@pytest.mark.parametrize(
    ("names", "prompt_tokens", "expected"),
    [
        (["p0", "d0"], 1000, "p0"),
        (["p0", "d0"], THRESHOLD, "p0"),
        (["p0", "d0"], THRESHOLD - 1, "d0*"),
        (["b0", "b1"], 1000, "b0*"),  # no engine is there only to decode
        (["b0", "d0"], 1000, "b0"),  # the only one to prefill, and one is there to decode
        (["b0", "d0"], 100, "b0*"),
        (["p0", "b0"], 1000, "p0"),
        (["p0", "b0"], 100, "b0*"),
        (["p0"], 1000, "p0*"),
        (["p0"], 10, "p0*"),
        (["d0"], 1000, "d0*"),
    ],
)
def test_where_a_request_begins(names: list[str], prompt_tokens: int, expected: str) -> None:
    assert Fleet(*names).pick(PREFILL, prompt_tokens) == expected


def test_a_threshold_of_zero_always_makes_a_pair() -> None:
    assert Fleet("p0", "d0", threshold=0).pick(PREFILL, 1, block_hash_prefixes=[1]) == "p0"


def test_an_engine_that_does_everything_keeps_what_no_decode_engine_can_take() -> None:
    fleet = Fleet("p0", "b0")
    fleet.load("p0", waiting=2)
    assert fleet.pick() == "b0*"


@pytest.mark.parametrize(
    ("names", "expected"), [(["p0", "d0"], "d0"), (["p0", "b0"], "b0"), (["p0"], "p0"), (["p0", "d0", "b0"], "d0")]
)
def test_where_a_request_goes_on(names: list[str], expected: str) -> None:
    assert Fleet(*names).pick(DECODE) == expected


@pytest.mark.parametrize(("names", "expected"), [(["p0", "d0"], "d0*"), (["p0", "b0"], "b0*"), (["p0"], "p0*")])
def test_who_takes_a_whole_request(names: list[str], expected: str) -> None:
    assert Fleet(*names).pick(BOTH) == expected


def test_legs_go_to_the_least_busy_of_their_role() -> None:
    fleet = Fleet("p0", "p1", "d0", "d1")
    fleet.load("p0", waiting=1)
    fleet.load("d0", running=3)
    assert [fleet.pick(PREFILL), fleet.pick(DECODE), fleet.pick(PREFILL, 20)] == ["p1", "d1", "d1*"]


def test_equal_engines_of_a_role_take_turns() -> None:
    fleet = Fleet("p0", "p1", "d0", "d1")
    assert [fleet.pick(leg) for leg in (PREFILL, DECODE) * 2] == ["p0", "d0", "p1", "d1"]


def test_a_role_that_changed_counts_at_once() -> None:
    fleet = Fleet("p0", "d0", "d1")
    fleet.load("d1", role=PREFILL)
    assert {fleet.pick(), fleet.pick()} == {"p0", "d1"}


def test_pairs_stay_in_one_pool_and_share_a_layout() -> None:
    fleet = Fleet("p0")
    fleet.records["d0"] = fleet.registry.join(identity("d0", weights=b"new"), report("d0"))
    fleet.records["p0"] = fleet.registry.join(identity("p0", weights=b"old"), report("p0"))
    assert fleet.pick() == "d0*", "p0 waits aside"
    asked = Fingerprint(model="m", weights=b"old")
    assert fleet.pick(DECODE, fingerprint=asked) == "p0"
    fleet.registry.leave(fleet.records["d0"])
    fleet.records["d1"] = fleet.registry.join(identity("d1", weights=b"old", kv_layout="HND/fp32"), report("d1"))
    fleet.records["p0"] = fleet.registry.join(identity("p0", weights=b"old", kv_layout="HND/bf16"), report("p0"))
    assert fleet.pick() != "p0"
    fleet.records["d2"] = fleet.registry.join(identity("d2", weights=b"old", kv_layout="HND/bf16"), report("d2"))
    assert fleet.pick() == "p0"
    assert fleet.pick(DECODE, fingerprint=Fingerprint(weights=b"old", kv_layout="HND/bf16")) == "d2"


def test_excluded_engines_leave_their_part_to_others() -> None:
    fleet = Fleet("p0", "d0")
    assert fleet.pick(PREFILL, exclude=[EngineRef(engine_id="p0", epoch=1)]) == "d0*"
    assert fleet.pick(DECODE, exclude=[EngineRef(engine_id="d0", epoch=1)]) == "p0"


def test_a_missing_role_is_warned_of_once_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("p0", "d0")
    with caplog.at_level(logging.WARNING):
        fleet.pick()
        assert not caplog.records
        fleet.load("d0", state=EngineState.ENGINE_STATE_DRAINING)
        for prompt_tokens in (1000, 10, 1000):
            assert fleet.pick(PREFILL, prompt_tokens) == "p0*"
        assert [record.message for record in caplog.records if "(no decode engine is serving)" in record.message]
        assert len(caplog.records) == 1
        fleet.load("d0")
        fleet.pick()
        fleet.load("p0", state=EngineState.ENGINE_STATE_DRAINING)
        assert fleet.pick() == "d0*"
        assert [record.message for record in caplog.records[1:] if "(no prefill engine is serving)" in record.message]
        assert len(caplog.records) == 2


# Cached prefixes


def test_a_prompt_mostly_cached_on_a_decode_engine_goes_straight_to_it() -> None:
    fleet = Fleet("p0", "d0", "d1")
    first = hashes(1000)
    assert [fleet.pick(PREFILL, block_hash_prefixes=first), fleet.pick(DECODE, block_hash_prefixes=first)] == [
        "p0",
        "d0",
    ]
    assert fleet.pick(PREFILL, 1100, block_hash_prefixes=first + hashes(100, seed=2)) == "d0*"
    assert fleet.pick(PREFILL, 1200, block_hash_prefixes=first + hashes(200, seed=3)) == "p0", "too much is new"
    assert fleet.pick(PREFILL, 1000, block_hash_prefixes=hashes(1000, seed=4)) == "p0"


def test_a_cached_prefix_is_worth_a_waiting_request_and_no_more() -> None:
    fleet = Fleet("d0", "d1")
    prompt = {"prompt_tokens": 1600, "block_hash_prefixes": hashes(1600)}
    assert fleet.pick(**prompt) == "d0*"
    fleet.load("d0", waiting=1, running=3)
    fleet.load("d1", running=4)
    assert fleet.pick(**prompt) == "d0*"  # 7 - 4 against 4
    fleet.load("d0", waiting=1, running=5)
    assert fleet.pick(**prompt) == "d1*"  # 9 - 4 against 4


def test_half_of_a_prompt_saves_half_as_much() -> None:
    fleet = Fleet("d0", "d1")
    assert fleet.pick(PREFILL, 800, block_hash_prefixes=hashes(800)) == "d0*"
    fleet.load("d0", running=3)
    asked = {"prompt_tokens": 1600, "block_hash_prefixes": hashes(800) + hashes(800, seed=2)}
    fleet.load("d1", running=1)
    assert fleet.pick(**asked) == "d0*"  # 3 - 2 against 1, and some of it is cached
    fleet = Fleet("d0", "d1")
    assert fleet.pick(PREFILL, 800, block_hash_prefixes=hashes(800)) == "d0*"
    fleet.load("d0", running=4)
    fleet.load("d1", running=1)
    assert fleet.pick(**asked) == "d1*"


def test_a_burst_with_one_prefix_over_idle_engines_spreads() -> None:
    fleet = Fleet("b0", "b1", "b2", "b3")
    names = []
    for _ in range(8):
        request = PickRequest(role=PREFILL, prompt_tokens=160, block_hash_prefixes=hashes(160))
        names.append(fleet.registry.pick(request).engine.engine_id)
    assert [names.count(name) for name in fleet.records] == [2, 2, 2, 2]


def test_a_decode_leg_prefers_the_cached_prefix_among_equals_only() -> None:
    fleet = Fleet("p0", "d0", "d1")
    prompt = {"block_hash_prefixes": hashes(1000)}
    assert [fleet.pick(DECODE, **prompt) for _ in range(3)] == ["d0"] * 3
    fleet.load("d0", running=1)
    assert fleet.pick(DECODE, **prompt) == "d1"


def test_an_engine_that_rejoins_keeps_its_prefixes_and_a_new_incarnation_has_none() -> None:
    fleet = Fleet("p0", "d0")
    prompt = {"block_hash_prefixes": hashes(1000)}
    fleet.pick(DECODE, **prompt)
    fleet.records["d0"] = fleet.registry.join(identity("d0"), report("d0"))
    assert fleet.pick(PREFILL, **prompt) == "d0*"
    newer = identity("d0")
    newer.epoch = 2
    fleet.records["d0"] = fleet.registry.join(newer, report("d0"))
    assert fleet.pick(PREFILL, **prompt) == "p0"


def test_hashes_that_cannot_be_do_no_harm() -> None:
    fleet = Fleet("p0", "d0")
    for _ in range(2):
        assert fleet.pick(DECODE, 1, block_hash_prefixes=range(10_000)) == "d0"


def test_a_snapshot_shows_the_threshold() -> None:
    assert snapshot_of(Fleet(threshold=9).registry).pd_threshold == 9


def test_a_request_that_pools_runs_on_an_engine_that_prefills() -> None:
    assert Fleet("p0", "d0").pick(PREFILL, 10) == "d0*"
    assert Fleet("p0", "d0").pick(PREFILL, 10, pools=True) == "p0"
