"""Whole steps of every family with the kernels of a GPU, on a device that finds tensors of another one."""

from collections import Counter

import numpy as np
import pytest
import torch

from tests.gpu_worker.kernels.triton.meta_launch import META, MetaLink, use_kernels_on_meta
from tests.gpu_worker.models.test_models import MODELS
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import BUILT_IN
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import StateRun
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.states import StateSlots
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers import triton_linear as triton_experts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.ops.triton_ops import TritonOps
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler, RowDemands
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels
from tokenloom.gpu_worker.sampler.host.logits_processors import RowEdit, SeenTokens, pack_bits

STEPS = {
    "one decode": ([1], [40]),
    "many decodes": ([1] * 20, [40] * 20),
    "prompts and decodes": ([1, 20, 1], [40, 60, 32]),
}
_OF_DELTA = {"short_conv", "gated_delta", "delta_gates", "gated_norm"}
OF_STATES = {
    "qwen3_next": _OF_DELTA,
    "qwen3_5_text": _OF_DELTA,
    "lfm2": {"short_conv"},
    "falcon_h1": {"short_conv", "mamba2"},
}
"""The kernels of states that a type launches, where they are not those of Mamba-2 with its norm."""


@pytest.fixture
def launched(monkeypatch):
    modules = (triton_backend, triton_experts, triton_linear, triton_ops, sampler_kernels)
    return use_kernels_on_meta(monkeypatch, modules)


@torch.inference_mode()
def compute(path, query_lens, seq_lens, dtype="bfloat16"):
    model = load_model(path, dtype, META, make_ops("auto", META))
    backend = make_attention_backend("auto", model.config, 16, META)
    assert backend.name == "triton"
    caches = backend.allocate(100)
    width = -(-max(seq_lens) // 16)
    tables = np.arange(len(seq_lens))[:, None] + np.zeros((1, width), dtype=np.int32)
    total = sum(query_lens)
    plan = backend.plan(np.cumsum([0, *query_lens]), np.array(seq_lens), tables, np.zeros(total, dtype=np.int64))
    ids, positions = torch.zeros(2, total, dtype=torch.int64, device=META)
    states = None
    if model.config.states is not None:
        slots = StateSlots(model.config, 2 * len(query_lens), META)
        slots.allocate()
        runs = [StateRun("r", length, 2 * row, 2 * row + 1) for row, length in enumerate(query_lens)]
        states = slots.plan(runs)
    return model.compute_logits(model.forward(ids, positions, caches, plan, (), states))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_stays_on_the_device(name, launched, save_checkpoint):
    model_type, entries = MODELS[name]
    path = save_checkpoint(model_type, **entries)
    for query_lens, seq_lens in STEPS.values():
        logits = compute(path, query_lens, seq_lens)
        assert logits.device == META
        assert logits.dtype == torch.float32
    assert "attend" in launched


# Beside Kimi-Linear's states PyTorch attends to compressed vectors.
@pytest.mark.parametrize("kind", [kind for kind in BUILT_IN if kind != "kimi_linear"])
def test_a_step_with_states_stays_on_the_device(kind, launched, tmp_path):
    path = write_model(kind, tmp_path, torch.bfloat16)
    for query_lens, seq_lens in STEPS.values():
        assert compute(path, query_lens, seq_lens).device == META
    of_states = {"short_conv", "gated_delta", "mamba2", "delta_gates", "gated_norm"}
    assert of_states & {*launched} == OF_STATES.get(kind, {"short_conv", "mamba2", "gated_norm"})


def test_weights_in_float16_stay_so(launched, save_checkpoint):
    logits = compute(save_checkpoint("llama", dtype=torch.float16), [1, 5], [40, 60], "float16")
    assert (logits.device, logits.dtype) == (META, torch.float32)


@pytest.mark.parametrize("length", [40, 400])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_layer_of_few_rows_is_six_kernels(length, model_type, launched, save_checkpoint):
    compute(save_checkpoint(model_type), [1], [length])
    counts = Counter(launched)
    assert counts["attend"] == 3
    in_layers = len(launched) - 2  # without the last norm and the logits
    assert in_layers == 6 * 3


def test_the_draw_of_a_step_stays_on_the_device(launched, save_checkpoint):
    """With everything that requests may ask for, and twice: the second time nothing is written for penalties."""
    logits = compute(save_checkpoint("llama"), [1] * 4, [40] * 4)
    seen, params = SeenTokens([1, 2]), CoreSamplingParams(max_tokens=4, seed=1, frequency_penalty=1.0)
    bias = (np.array([5]), np.array([2.0], dtype=np.float32))
    edit = RowEdit([np.array([3, 4])], [pack_bits(np.array([1, 2, 40]))], bias, (seen, params))
    asked = RowDemands({1: edit, 2: RowEdit(forced=7)}, {0: (3, (1,)), 1: (0, ())})
    sampler = DeviceSampler(TritonSamplerKernels(), MetaLink())
    for index in range(2):
        launched.clear()
        pending = sampler.start(logits, [params] * 4, np.full(4, index), asked)
        assert pending.token_ids.device == META
        assert not pending.left_out
        assert launched == ["add_listed", "change_rows", "sample", "count_drawn", "logprobs"]
    launched.clear()
    sampler.start_logprobs(logits, [1, 2, 3, 4], 5)
    assert launched == ["logprobs"]


def test_the_operations_follow_the_device():
    assert not isinstance(make_ops("auto", META), TritonOps)
    assert not isinstance(make_ops("torch", torch.device("cuda")), TritonOps)
