"""Experts of both legs, and of engines that were lost, become those of one output."""

from tests.services.output_processor.harness import Mesh
from tests.services.output_processor.legs import part, prefilling, roles
from tokenloom.services.output_processor.request.sample_output import RoutedOutput
from tokenloom.v1.types_pb2 import RoutedExperts, SamplingParams

__all__ = ["roles"]  # a fixture


def rows(first: int, last: int) -> RoutedExperts:
    """Rows of one layer and expert; the numbers are the positions."""
    return RoutedExperts(start=first, num_layers=1, top_k=1, id_bytes=1, expert_ids=bytes(range(first, last)))


def asking(start: int = 0) -> SamplingParams:
    return SamplingParams(return_routed_experts=True, routed_experts_prompt_start=start)


def test_rows_of_several_attempts_are_joined() -> None:
    output = RoutedOutput(asking(), 4, 0)
    output.add(rows(0, 5), 1)
    assert output.next_start == 5
    output.add(rows(4, 12), 5)  # the engine computed more than the output had when it was lost
    assert output.next_start == 9
    output.add(rows(9, 11), 8)
    message = output.message(7)
    assert message is not None
    assert (message.start, message.expert_ids) == (0, bytes(range(10)))


def test_samples_after_the_first_begin_after_the_prompt() -> None:
    output = RoutedOutput(asking(2), 4, 1)
    assert output.next_start == 4
    output.add(rows(4, 8), 5)
    message = output.message(5)
    assert message is not None
    assert (message.start, message.expert_ids) == (4, bytes(range(4, 8)))


def test_missing_rows_are_not_hidden() -> None:
    output = RoutedOutput(asking(), 4, 0)
    output.add(rows(0, 4), 1)
    assert output.message(3) is None
    assert RoutedOutput(asking(), 4, 0).message(3) is None


async def test_the_decode_leg_continues_those_of_the_prefill(mesh: Mesh) -> None:
    ids = mesh.ids("Once upon a time")
    gateway, prefill = await prefilling(mesh, return_routed_experts=True)
    prefill.stream.prefilled(prefill.slot, 0, ids[:1], routed_experts=rows(0, 3))
    await gateway.next_frame()
    decode = await part(mesh, 2)
    assert decode.add.sampling_params.routed_experts_prompt_start == 3
    decode.stream.send((decode.slot, 1, ids[1:]))
    decode.finish(len(ids), routed_experts=rows(3, 3 + len(ids)))
    _, _, finished = await gateway.until_finished(1)
    assert finished.routed_experts.expert_ids == bytes(range(3 + len(ids) - 1))
