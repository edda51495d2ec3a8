"""What the coordinator last reported of the engines, as the event loop and the thread of a scrape see it."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from tests.loop_clock import pass_time
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.services.gateway.generation.admission import WaitEstimator
from tokenloom.services.gateway.mesh import mesh_view
from tokenloom.services.gateway.mesh.mesh_view import LOST_SECONDS, MeshView
from tokenloom.services.gateway.serving.mesh_gauges import MeshGauges
from tokenloom.services.runtime.peers.hello import misfit_of
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_SERVING,
    DesiredState,
    EngineEntry,
    EngineIdentity,
    EngineLoads,
    EngineReport,
    Snapshot,
)
from tokenloom.v1.engine_pb2 import KVSource
from tokenloom.v1.output_processor_pb2 import KVHandover
from tokenloom.v1.types_pb2 import ENGINE_ROLE_ENCODE, Fingerprint, ModelLimits

FINGERPRINT = Fingerprint(model="m", tokenizer=b"t")
NO_CHANNELS: Any = None


def entry(number: int, running: int) -> EngineEntry:
    identity = EngineIdentity(engine_id=f"engine-{number}", fingerprint=FINGERPRINT, num_kv_blocks=10)
    return EngineEntry(
        number=number, identity=identity, report=EngineReport(state=ENGINE_STATE_SERVING, running=running)
    )


def taken(mesh: MeshView, *messages: Snapshot) -> RegistryView:
    view = RegistryView()
    for message in messages:
        assert view.take(message)
    mesh._take(view)
    return view


def whole(*entries: EngineEntry) -> Snapshot:
    return Snapshot(coordinator_epoch=1, revision=1, complete=True, engines=entries)


def gauges(mesh: MeshView) -> dict[str, float]:
    shown = MeshGauges(mesh, WaitEstimator(10.0), "m").collect()
    return {sample.name: sample.value for family in shown for sample in family.samples}


async def test_a_scrape_changes_nothing_of_what_the_event_loop_reads() -> None:
    """It took loads in: one that arrived at this moment was lost, or broke the loop that wrote it."""
    mesh = MeshView("", NO_CHANNELS)
    view = taken(mesh, whole(entry(1, 3), entry(2, 4)))
    loads = EngineLoads(number=[2], running=[9])
    assert view.take(Snapshot(coordinator_epoch=1, base_revision=1, revision=2, complete=True, loads=loads))
    before = dict(view._pending)
    seen = await asyncio.to_thread(gauges, mesh)
    assert (seen["vllm:num_requests_running"], view._pending) == (7, before)
    assert mesh.load().num_running == 12, "the loop takes it in"
    assert (await asyncio.to_thread(gauges, mesh))["vllm:num_requests_running"] == 12


async def test_a_scrape_counts_the_engines_that_are_lost() -> None:
    mesh = MeshView("", NO_CHANNELS)
    taken(mesh, whole(entry(1, 3), entry(2, 4)))
    taken(mesh, whole(entry(1, 3)))
    before = mesh._lost
    assert await asyncio.to_thread(mesh.count_engines, FINGERPRINT) == (1, 2)
    pass_time(LOST_SECONDS + 1)
    assert await asyncio.to_thread(mesh.count_engines, FINGERPRINT) == (1, 1)
    assert mesh._lost is before
    taken(mesh, whole(entry(1, 3)))
    assert mesh._lost == {}, "the loop forgets it"


async def test_a_request_waits_for_the_first_engine() -> None:
    mesh = MeshView("", NO_CHANNELS)
    mesh.follow_capacity(FINGERPRINT, lambda capacity: None)
    waiting = asyncio.ensure_future(mesh.wait_limits())
    taken(mesh, whole())
    await asyncio.sleep(0)
    assert not waiting.done()
    taken(mesh, whole(entry(1, 0)))
    assert await waiting is mesh.limits


async def test_what_servers_of_others_lack_limits_no_mesh_that_has_or_had_engines_of_its_own() -> None:
    def limited(name: str, numerics: str, **limits: Any) -> EngineEntry:
        served = Fingerprint(model="m", tokenizer=b"t", numerics=numerics)
        values = {"vocab_size": 9, **limits}
        identity = EngineIdentity(engine_id=name, fingerprint=served, limits=ModelLimits(**values))
        return EngineEntry(identity=identity, report=EngineReport(state=ENGINE_STATE_SERVING))

    ours = limited("ours", "cpu/float32", max_model_len=64, hidden_size=8, priorities=True)
    theirs = limited("theirs", "vllm/0.32.0", max_model_len=32)
    mesh = MeshView("", NO_CHANNELS)
    mesh.follow_capacity(FINGERPRINT, lambda capacity: None)
    seen = []
    for entries in ((theirs,), (theirs, ours), (theirs,)):
        taken(mesh, whole(*entries))
        assert mesh.limits is not None
        seen.append((mesh.limits.max_model_len, mesh.limits.hidden_size, mesh.limits.priorities))
    assert seen == [(32, 0, False), (32, 8, True), (32, 8, True)]


def encoder(name: str, weights: bytes) -> EngineEntry:
    identity = EngineIdentity(engine_id=name, fingerprint=Fingerprint(model="m", weights=weights))
    return EngineEntry(identity=identity, report=EngineReport(role=ENGINE_ROLE_ENCODE, state=ENGINE_STATE_SERVING))


def with_encoders(*encoders: EngineEntry, engine: bytes, desired: DesiredState | None = None) -> Snapshot:
    shown = entry(1, 0)
    shown.identity.fingerprint.weights = engine
    return Snapshot(
        coordinator_epoch=1, revision=1, complete=True, engines=[shown], encoders=encoders, desired=desired,
        new_encoders=True,
    )  # fmt: skip


def names(mesh: MeshView) -> list[str]:
    return [each.identity.engine_id for each in mesh.encoders]


async def test_an_encoder_of_another_checkpoint_gets_no_files() -> None:
    """Its rows would make answers that are wrong, and nothing would say so."""
    fall_backs = FallBacks()
    mesh = MeshView("", NO_CHANNELS, fall_backs)
    both = encoder("right", b"one"), encoder("wrong", b"two")
    taken(mesh, with_encoders(*both, engine=b"one"))
    assert names(mesh) == ["right", "wrong"], "it is not known yet what is served"
    mesh.follow_capacity(FINGERPRINT, lambda capacity: None)
    assert (names(mesh), mesh.count_encoders()) == (["right"], (1, 2))
    assert [(each.kind, each.subject) for each in fall_backs.active] == [("other_weights", "wrong")]
    taken(mesh, with_encoders(*both, engine=b"two"))
    assert names(mesh) == ["wrong"], "all engines were replaced"
    assert [each.subject for each in fall_backs.active] == ["right"]
    taken(mesh, with_encoders(encoder("wrong", b"two"), engine=b"two"))
    assert (names(mesh), fall_backs.active) == (["wrong"], [])


async def test_an_engine_that_may_have_come_is_no_fault_of_the_client() -> None:
    mesh = MeshView("", NO_CHANNELS)
    taken(mesh, whole(entry(1, 0)))
    mesh.check_source(KVHandover(source=KVSource(engine_id="engine-1")))
    other = KVHandover(source=KVSource(engine_id="engine-2"))
    with pytest.raises(InvalidArgument, match="has no engine 'engine-2'"):
        mesh.check_source(other)
    mesh._lose("it died")
    mesh.check_source(KVHandover(source=KVSource(engine_id="engine-1")))
    with pytest.raises(Unavailable, match="the coordinator is away; retry"):
        mesh.check_source(other)


async def test_encoders_are_compared_with_each_version_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand engines, and not with each: the gateway has other things to do."""
    compared: list[int] = []

    def misfit(encoder: Fingerprint, engines: Iterable[Fingerprint]) -> str:
        compared.append(len([*engines]))
        return misfit_of(encoder, engines)

    monkeypatch.setattr(mesh_view, "misfit_of", misfit)
    engines = [entry(1, 0) for _ in range(9)]
    for index, each in enumerate(engines):
        each.identity.engine_id, each.number = f"engine-{index}", index
        each.identity.fingerprint.weights = b"one" if index % 2 else b"two"
    mesh = MeshView("", NO_CHANNELS)
    mesh.follow_capacity(FINGERPRINT, lambda capacity: None)
    shown = with_encoders(encoder("a", b"one"), encoder("b", b"three"), engine=b"one")
    del shown.engines[:]
    shown.engines.extend(engines)
    taken(mesh, shown)
    assert (compared, names(mesh)) == ([2, 2], ["a"])


async def test_encoders_of_unknown_or_replaced_weights_are_used() -> None:
    mesh = MeshView("", NO_CHANNELS)
    mesh.follow_capacity(FINGERPRINT, lambda capacity: None)
    taken(mesh, with_encoders(encoder("a", b""), encoder("b", b"two"), engine=b""))
    assert names(mesh) == ["a", "b"]
    reloaded = DesiredState(revision=1, weights_path="/new", weights_version=1)
    taken(mesh, with_encoders(encoder("b", b"two"), engine=b"one", desired=reloaded))
    assert names(mesh) == ["b"], "no file has the weights that engines got after their start"
