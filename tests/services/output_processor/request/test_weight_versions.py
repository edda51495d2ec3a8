"""An answer comes from one version of the weights, whatever is lost meanwhile, and says from which."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.services.output_processor.fakes import LENGTH, EngineStream, Gateway, submit
from tests.services.output_processor.harness import Mesh
from tokenloom.request import wire_errors
from tokenloom.request.errors import TokenloomError, Unavailable, WeightsReplaced
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.output_processor_pb2 import SampleJournal, SampleWeights
from tokenloom.v1.types_pb2 import FinishReason

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
OLD_NAME, NEW_NAME = OLD.hex()[:16], NEW.hex()[:16]
ERROR = FinishReason.FINISH_REASON_ERROR


@pytest.fixture
def versions(mesh: Mesh) -> Mesh:
    """Both engines serve the old weights, as the coordinator knows."""
    for index, engine in enumerate(mesh.engines):
        identity = EngineIdentity()
        identity.CopyFrom(engine.identity)
        identity.fingerprint.weights = OLD
        mesh.coordinator.engines[index] = identity
        engine.identity = EngineIdentity()
        engine.identity.CopyFrom(identity)
    return mesh


def serves(mesh: Mesh, index: int, weights: bytes) -> None:
    """The engine says so when it is connected to next; the coordinator does not know yet."""
    mesh.engines[index].identity.fingerprint.weights = weights


def end(slot: int, count: int) -> list[Finished]:
    return [Finished(slot=slot, reason=LENGTH, num_output_tokens=count)]


def failed(slot: int, error: TokenloomError, count: int) -> list[Finished]:
    return [Finished(slot=slot, reason=ERROR, error=wire_errors.to_proto(error), num_output_tokens=count)]


async def begun(mesh: Mesh, gateway: Gateway, tokens: Sequence[int], **fields: Any) -> tuple[EngineStream, int]:
    stream, (slot,) = await mesh.started(gateway, submit(1, **fields))
    stream.send((slot, 0, tokens))
    frame = await gateway.next_frame()
    assert list(frame.weights) == [SampleWeights(slot=1, weights=[OLD])]
    assert list(frame.token_ids) == list(tokens)
    return stream, slot


async def test_each_end_names_the_weights(versions: Mesh) -> None:
    gateway = await versions.gateway()
    stream, slot = await begun(versions, gateway, [65])
    stream.send(finished=end(slot, 1))
    assert (await gateway.until_finished(1))[2].weights_version == OLD_NAME


async def test_engines_without_weights_name_none(mesh: Mesh) -> None:
    gateway = await mesh.gateway()
    stream, (slot,) = await mesh.started(gateway, submit(1))
    stream.send((slot, 0, [65]), finished=end(slot, 1))
    frame = await gateway.next_frame()
    assert not frame.weights
    assert frame.finished[0].weights_version == ""


async def test_the_rest_of_an_answer_does_not_run_on_other_weights(versions: Mesh) -> None:
    """Also not where the coordinator picks an engine that has loaded others meanwhile."""
    gateway = await versions.gateway()
    stream, slots = await versions.started(gateway, submit(1), submit(2))
    stream.send(*((slot, 0, [65]) for slot in slots))
    assert len((await gateway.next_frame()).weights) == 2
    serves(versions, 1, NEW)
    stream.frames.put_nowait(None)  # the engine lives on
    other = await versions.engines[1].next_stream()
    again = await versions.engines[0].next_stream()
    adds = await again.next_adds(2)
    assert [list(add.accepted_token_ids) for add in adds] == [[65]] * 2
    assert {pick.fingerprint.weights for pick in versions.coordinator.requests[2:]} == {OLD}
    assert other.inputs.empty()
    again.send(*((add.slot, 1, [66]) for add in adds), finished=[end(add.slot, 2)[0] for add in adds])
    assert [each.weights_version for each in (await gateway.next_frame()).finished] == [OLD_NAME] * 2


async def test_without_a_token_any_weights_will_do(versions: Mesh) -> None:
    gateway = await versions.gateway()
    stream, _ = await versions.started(gateway, submit(1))
    serves(versions, 1, NEW)
    stream.die()
    other = await versions.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    other.send((add.slot, 0, [66]), finished=end(add.slot, 1))
    assert (await gateway.until_finished(1))[2].weights_version == NEW_NAME


async def test_what_an_operator_lets_go_on_names_both(versions: Mesh) -> None:
    gateway = await versions.gateway()
    stream, slot = await begun(versions, gateway, [65])
    serves(versions, 1, NEW)
    stream.send(finished=failed(slot, WeightsReplaced("the engine's weights were replaced"), 1))
    other = await versions.engines[1].next_stream()
    (add,) = await other.next_adds(1)
    assert list(add.accepted_token_ids) == [65]
    assert versions.coordinator.requests[-1].fingerprint.weights == b""
    other.send((add.slot, 1, [66]), finished=end(add.slot, 2))
    frame = await gateway.next_frame()
    assert list(frame.weights) == [SampleWeights(slot=1, weights=[OLD, NEW])]
    assert frame.finished[0].weights_version == f"{OLD_NAME}+{NEW_NAME}"


async def test_other_changes_of_weights_end_what_has_begun(versions: Mesh) -> None:
    gateway = await versions.gateway()
    stream, slot = await begun(versions, gateway, [65])
    stream.send(finished=failed(slot, Unavailable("the engine's weights were replaced"), 1))
    finished = (await gateway.until_finished(1))[2]
    assert (finished.reason, finished.weights_version) == (ERROR, OLD_NAME)


@pytest.mark.parametrize("known", [[OLD], [NEW, OLD]])
async def test_an_output_processor_that_takes_over_goes_on_with_the_weights_of_the_journal(
    versions: Mesh, known: list[bytes]
) -> None:
    serves(versions, 0, NEW)
    gateway = await versions.gateway()
    journal = SampleJournal(token_ids=[65], weights=known)
    await gateway.send(submit=[submit(1, journals=[journal])])
    stream = await versions.engines[1].next_stream()
    (add,) = await stream.next_adds(1)
    assert versions.coordinator.requests[0].fingerprint.weights == OLD
    assert versions.coordinator.requests[0].fingerprint.block_size == 0, "numerics are not known"
    stream.send((add.slot, 1, [66]), finished=end(add.slot, 2))
    finished = (await gateway.until_finished(1))[2]
    assert finished.weights_version == "+".join(each.hex()[:16] for each in known)


@pytest.mark.parametrize("weights", [[], [OLD]])
@pytest.mark.parametrize(
    ("known", "was_mixed", "is_mixed"), [("a", False, False), ("b", False, True), ("a", True, True)]
)
async def test_an_output_processor_that_takes_over_knows_how_the_tokens_were_computed(
    mesh: Mesh, weights: list[bytes], known: str, *, was_mixed: bool, is_mixed: bool
) -> None:
    for engine in mesh.engines:
        engine.identity.fingerprint.numerics = "a"
        engine.identity.fingerprint.weights = b"".join(weights)
    gateway = await mesh.gateway()
    journal = SampleJournal(token_ids=[65], emitted_text_bytes=1, weights=weights, numerics=known)
    journal.mixed_numerics = was_mixed
    await gateway.send(submit=[submit(1, journals=[journal])])
    stream = await mesh.engines[0].next_stream()
    (add,) = await stream.next_adds(1)
    asked = mesh.coordinator.requests[0].fingerprint
    assert (asked.numerics, asked.weights, asked.block_size) == (known, b"".join(weights), 0)
    stream.send((add.slot, 1, [66]), finished=end(add.slot, 2))
    frame = await gateway.next_frame()
    (said,) = frame.weights
    assert said == SampleWeights(slot=1, weights=weights, numerics="a", mixed_numerics=is_mixed)
    assert frame.finished[0].timeline.mixed_numerics == is_mixed


async def test_a_sample_that_was_computed_in_another_way_is_placed_by_itself(mesh: Mesh) -> None:
    journals = [SampleJournal(sample_index=index, token_ids=[65], numerics="ab"[index]) for index in range(2)]
    mesh.engines[0].identity.fingerprint.numerics = "a"
    gateway = await mesh.gateway()
    await gateway.send(submit=[submit(1, num_samples=2, journals=journals)])
    await (await mesh.engines[0].next_stream()).next_adds(2)
    assert [pick.fingerprint.numerics for pick in mesh.coordinator.requests] == ["a", "b"]


async def test_samples_of_other_weights_are_placed_by_themselves(versions: Mesh) -> None:
    """One of two samples had gone on with new weights when the output processor was lost."""
    journals = [
        SampleJournal(sample_index=0, token_ids=[65], weights=[OLD]),
        SampleJournal(sample_index=1, token_ids=[65], weights=[OLD, NEW]),
    ]
    serves(versions, 1, NEW)
    gateway = await versions.gateway()
    await gateway.send(submit=[submit(1, num_samples=2, journals=journals)])
    first = await versions.engines[0].next_stream()
    (add,) = await first.next_adds(1)
    other = await versions.engines[1].next_stream()
    (other_add,) = await other.next_adds(1)
    first.send((add.slot, 1, [66]), finished=end(add.slot, 2))
    other.send((other_add.slot, 1, [66]), finished=end(other_add.slot, 2))
    ends: dict[int, str] = {}
    while len(ends) < 2:
        ends |= {each.sample_index: each.weights_version for each in (await gateway.next_frame()).finished}
    assert ends == {0: OLD_NAME, 1: f"{OLD_NAME}+{NEW_NAME}"}


@pytest.mark.parametrize("trace", [{}, {"traceparent": "00-1-2-01"}])
async def test_an_answer_ends_when_no_engine_has_its_weights_any_more(versions: Mesh, trace: dict[str, str]) -> None:
    """Asked over the stream of picks, or by a call of its own; neither waits for the deadline."""
    gateway = await versions.gateway()
    stream, _ = await begun(versions, gateway, [65], trace_headers=trace)
    versions.coordinator.error = WeightsReplaced("no engine has them any more")
    stream.die()
    finished = (await gateway.until_finished(1))[2]
    assert (finished.error.reason, finished.weights_version) == ("WEIGHTS_REPLACED", OLD_NAME)
