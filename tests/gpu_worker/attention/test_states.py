"""Slots for the states of layers, and the runs of a step that read and write them."""

from dataclasses import replace

import pytest
import torch

from tokenloom.engine_core.data.scheduler_output import StateRun
from tokenloom.gpu_worker.attention.cache import kv_layout
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan, StateSlots, allocate_states
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig, StateLayout, StateShape

CPU = torch.device("cpu")
DELTA = StateShape(channels=12, taps=3, recurrent=(2, 4, 5))
SHORT = StateShape(channels=8, taps=2)
CONFIG = ModelConfig(
    family="transformers",
    dtype_name="bfloat16",
    vocab_size=99,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_model_len=512,
    norm_eps=0.0,
    hidden_act="",
    tie_word_embeddings=False,
    attention_scales=(1.0, 1.0),
    sliding_windows=(None, None),
)
WITH_STATES = replace(CONFIG, states=StateLayout((DELTA, None, SHORT, DELTA), "scan"))


def test_states_are_laid_out_layer_by_layer() -> None:
    layers = allocate_states(WITH_STATES, 7, CPU)
    assert layers[1] is None
    first, short = layers[0], layers[2]
    assert first is not None
    assert first.recurrent is not None
    assert (first.conv.shape, first.conv.dtype) == ((7, 3, 12), torch.bfloat16)
    assert (first.recurrent.shape, first.recurrent.dtype) == ((7, 2, 4, 5), torch.float32)
    assert short is not None
    assert short.recurrent is None
    tensors = [each for layer in layers if layer for each in layer if each is not None]
    assert sum(tensor.nbytes for tensor in tensors) == 7 * WITH_STATES.state_bytes
    assert WITH_STATES.state_bytes == 2 * (12 * 3 * 2 + 40 * 4) + 8 * 2 * 2


def test_a_model_without_states_has_none() -> None:
    assert CONFIG.state_bytes == 0
    slots = StateSlots(CONFIG, 4, CPU)
    slots.allocate()
    assert slots.layers == []


def test_the_plan_of_a_step_has_the_runs_in_order() -> None:
    slots = StateSlots(WITH_STATES, 4, CPU)
    slots.allocate()
    plan = slots.plan([StateRun("a", 64, FROM_ZERO, 2), StateRun("a", 3, 2, 1), StateRun("b", 1, 0, 0)])
    assert plan.read.tolist() == [FROM_ZERO, 2, 0]
    assert plan.written.tolist() == [2, 1, 0]
    assert plan.cu_lens.tolist() == [0, 64, 67, 68]
    assert {plan.read.dtype, plan.written.dtype, plan.cu_lens.dtype} == {torch.int32}
    assert plan.layers is slots.layers


def test_runs_of_prompts_are_divided_into_chunks() -> None:
    """Single tokens behind a prompt are scanned; one before a run of several is of the prompt."""
    lengths, read, written = [1, 64, 70, 1, 1, 1, 5], [0, FROM_ZERO, 1, 2, 2, 3, 4], [0, 1, 2, 2, 2, 4, 5]
    sent = StatePlan.make(lengths, read, written, [], 64).send(CPU).sent
    assert sent is not None
    assert sent.chains.tolist() == [[0, 1], [1, 5], [5, 7]]
    assert sent.scanned.tolist() == [[0, 1], [3, 5]]
    assert sent.chunks is not None
    assert sent.chunks.read.tolist() == [FROM_ZERO, 1, 3, 4]
    assert sent.chunks.written.tolist() == [1, 2, 4, 5]
    assert sent.chunks.run_chunks.tolist() == [0, 1, 3, 4, 5]
    assert sent.chunks.chains.tolist() == [[0, 2], [2, 4]]
    assert sent.chunks.chunks.tolist() == [[1, 65], [65, 129], [129, 135], [137, 138], [138, 143]]
    assert {each.dtype for each in (*sent.chunks, sent.scanned, sent.chains)} == {torch.int32}


def test_a_step_without_prompts_has_no_chunks() -> None:
    sent = StatePlan.make([1, 1], [0, 1], [0, 1], [], 64).send(CPU).sent
    assert sent is not None
    assert sent.chunks is None
    assert sent.scanned.tolist() == [[0, 1], [1, 2]]


def test_modules_divide_prompts_themselves() -> None:
    slots = StateSlots(replace(WITH_STATES, states=StateLayout((DELTA, None), "modules", 64)), 4, CPU)
    slots.allocate()
    assert slots.plan([StateRun("a", 64, FROM_ZERO, 2)]).chunk == 1


def test_dummy_steps_have_a_slot_of_their_own() -> None:
    slots = StateSlots(WITH_STATES, 4, CPU)
    slots.allocate()
    plan = slots.dummy_plan([5, 1, 1])
    assert plan.written.tolist() == [4, 4, 4]
    assert plan.read.tolist() == [FROM_ZERO, 4, 4]
    assert slots.layers[0] is not None
    assert len(slots.layers[0].conv) == 5


def test_slots_that_are_made_again_are_empty() -> None:
    slots = StateSlots(WITH_STATES, 1, CPU)
    slots.allocate()
    assert slots.layers[0] is not None
    slots.layers[0].conv.fill_(1)
    slots.allocate()
    assert slots.layers[0].conv.any()
    slots.drop()
    slots.allocate()
    assert slots.layers[0] is not None
    assert not slots.layers[0].conv.any()


@pytest.mark.parametrize(
    "layers", [(DELTA, SHORT), (DELTA, DELTA), (DELTA._replace(taps=4), None), (DELTA._replace(recurrent=(4, 2, 5)),)]
)
def test_the_layout_of_the_pool_names_states(layers: tuple[StateShape | None, ...]) -> None:
    names = {kv_layout(replace(WITH_STATES, states=StateLayout(each, "scan")), 16) for each in (layers, (DELTA, None))}
    assert len(names) == 2
    assert all("/state/bf16+fp32/" in name for name in names)
