"""Engines that are of less use than they seem are shown: without partners for their KV, or out of reach."""

import logging

import pytest

from tests.services.coordinator.snapshots import snapshot_of
from tests.services.coordinator.test_roles import DECODE, PREFILL, Fleet, identity, report
from tokenloom.services.coordinator.engines.engine_record import PICK_SECONDS
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.engines.engine_signs import DAMAGED_SECONDS
from tokenloom.v1.coordinator_pb2 import EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import FallBack, Fingerprint


def shown(registry: Registry) -> dict[str, dict[str, str]]:
    """Fall-backs of each engine, as watchers see them."""
    return {
        engine.identity.engine_id: {each.kind: each.detail for each in engine.report.fall_backs}
        for engine in snapshot_of(registry).engines
    }


def join(fleet: Fleet, name: str, layout: str) -> None:
    fleet.records[name] = fleet.registry.join(identity(name, kv_layout=layout), report(name))


def test_engines_whose_layouts_differ_never_hand_over_which_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = Fleet()
    join(fleet, "p0", "x/16")
    join(fleet, "d0", "x/32")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fleet.registry.refresh()
            assert fleet.pick().endswith("*"), "a request stays on one engine"
    assert [each.message.split(":")[0] for each in caplog.records] == [
        "fall-back no_pair of p0",
        "fall-back no_pair of d0",
    ]
    reason = "its KV layout is x/16, that of the engines of the other role is x/32"
    assert shown(fleet.registry)["p0"] == {"no_pair": reason}
    assert list(shown(fleet.registry)["d0"]) == ["no_pair"]
    join(fleet, "d1", "x/16")
    fleet.registry.refresh()
    assert shown(fleet.registry)["p0"] == {}
    assert list(shown(fleet.registry)["d0"]) == ["no_pair"], "it still takes from none"
    assert fleet.pick() == "p0"
    fleet.registry.leave(fleet.records["d0"])
    fleet.registry.refresh()
    assert not any(shown(fleet.registry).values())


@pytest.mark.parametrize(
    "engines", [[("p0", "x"), ("d0", "x")], [("b0", "x"), ("b1", "y")], [("p0", "x"), ("p1", "y")]]
)
def test_engines_with_partners_and_those_that_need_none_are_not_shown(engines: list[tuple[str, str]]) -> None:
    fleet = Fleet()
    for name, layout in engines:
        join(fleet, name, layout)
    fleet.registry.refresh()
    assert not any(shown(fleet.registry).values())


def test_an_engine_that_no_request_reaches_is_shown_until_one_does(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet("b0")
    request = PickRequest(fingerprint=Fingerprint(model="m"), role=PREFILL, prompt_tokens=3)
    with caplog.at_level(logging.WARNING):
        for lost in range(1, 5):
            pick = fleet.registry.pick(request).pick
            fleet.clock.now += PICK_SECONDS + 0.1
            fleet.load("b0")
            fleet.registry.refresh()
            assert bool(shown(fleet.registry)["b0"]) == (lost >= 3)
    assert [each.message.split(":")[0] for each in caplog.records] == ["fall-back unreached of b0"]
    assert shown(fleet.registry)["b0"] == {"unreached": "3 requests in a row did not arrive at unix:/b0"}
    pick = fleet.registry.pick(request).pick
    fleet.load("b0", picks_arrived=[PickId(coordinator_epoch=pick.coordinator_epoch, number=pick.number)])
    assert shown(fleet.registry)["b0"] == {}


def lose_picks(fleet: Fleet, count: int = 3) -> None:
    for _ in range(count):
        fleet.registry.pick(PickRequest(fingerprint=Fingerprint(model="m"), role=PREFILL, prompt_tokens=3))
        fleet.clock.now += PICK_SECONDS + 0.1
        fleet.load("b0")
        fleet.registry.refresh()


def test_an_engine_that_joins_again_is_out_of_reach_until_a_request_arrives() -> None:
    fleet = Fleet("b0")
    lose_picks(fleet)
    fleet.records["b0"] = fleet.registry.join(identity("b0"), report("b0"))
    fleet.registry.refresh()
    assert list(shown(fleet.registry)["b0"]) == ["unreached"], "nothing has shown the opposite"
    fleet.pick()
    assert shown(fleet.registry)["b0"] == {}


def test_an_engine_is_reached_whose_new_stream_begins_with_a_request_that_arrived() -> None:
    fleet = Fleet("b0")
    lose_picks(fleet)
    arrived = fleet.registry.pick(PickRequest(fingerprint=Fingerprint(model="m"), role=PREFILL, prompt_tokens=3)).pick
    fleet.records["b0"] = fleet.registry.join(identity("b0"), report("b0", picks_arrived=[arrived]))
    fleet.registry.refresh()
    assert shown(fleet.registry)["b0"] == {}


def test_a_restarted_engine_has_none_of_its_predecessor_s_signs() -> None:
    fleet = Fleet("b0")
    lose_picks(fleet)
    successor = identity("b0")
    successor.epoch, successor.address = 2, "unix:/elsewhere"
    fleet.registry.join(successor, report("b0"))  # before the end of its predecessor's stream is known
    fleet.registry.leave(fleet.records["b0"])
    fleet.registry.refresh()
    assert shown(fleet.registry)["b0"] == {}


def test_damaged_weights_are_shown_for_an_hour_though_the_engine_is_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine ends at once, and the memory of its machine is not to be trusted afterwards either."""
    fleet = Fleet("b0", "b1")
    damage = FallBack(kind="damaged_weights", detail="bytes 0 to 7 of model.a have changed")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            fleet.load("b0", fall_backs=[damage], state=EngineState.ENGINE_STATE_DEAD)
        fleet.registry.leave(fleet.records["b0"])
        fleet.registry.refresh()
        successor = identity("b0")
        successor.epoch = 2
        fleet.records["b0"] = fleet.registry.join(successor, report("b0"))
    assert [each.message.split(":")[0] for each in caplog.records] == ["fall-back damaged_weights of b0"]
    assert fleet.registry.num_ended["damaged_weights"] == 1
    fleet.clock.now += DAMAGED_SECONDS - 1
    fleet.registry.refresh()
    assert shown(fleet.registry) == {"b0": {damage.kind: damage.detail}, "b1": {}}
    fleet.registry.changed.take_others()
    fleet.clock.now += 1
    fleet.registry.refresh()
    assert shown(fleet.registry) == {"b0": {}, "b1": {}}
    assert "b0" in fleet.registry.changed.take_others()
    fleet.load("b0", fall_backs=[damage])
    assert fleet.registry.num_ended["damaged_weights"] == 2, "again, in the next process"


def test_an_engine_that_joins_anew_with_damaged_weights_is_counted_once() -> None:
    fleet = Fleet("b0")
    damage = [FallBack(kind="damaged_weights", detail="bytes 0 to 7 of model.a have changed")]
    fleet.load("b0", fall_backs=damage)
    fleet.registry.join(identity("b0"), report("b0", fall_backs=damage))
    assert fleet.registry.num_ended["damaged_weights"] == 1


def test_single_picks_that_are_lost_are_no_sign() -> None:
    fleet = Fleet("b0")
    request = PickRequest(fingerprint=Fingerprint(model="m"), role=DECODE, prompt_tokens=3)
    for _ in range(6):
        fleet.registry.pick(request)
        fleet.clock.now += PICK_SECONDS + 0.1
        fleet.registry.refresh()
        arrived = fleet.registry.pick(request).pick
        fleet.load("b0", picks_arrived=[arrived])
        assert shown(fleet.registry)["b0"] == {}


def test_an_engine_that_left_takes_its_signs_along() -> None:
    fleet = Fleet()
    join(fleet, "p0", "x")
    join(fleet, "d0", "y")
    fleet.registry.refresh()
    fleet.load("d0", state=EngineState.ENGINE_STATE_DRAINING)
    fleet.registry.leave(fleet.records["d0"])
    fleet.registry.refresh()
    assert not any(shown(fleet.registry).values())
