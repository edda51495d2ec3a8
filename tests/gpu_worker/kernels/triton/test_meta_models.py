"""What computes beside the built-in decoders, on a device that finds tensors of another one."""

import pytest
import torch

from tests.gpu_worker.kernels.triton.meta_launch import META, MetaLink, use_kernels_on_meta
from tests.gpu_worker.pooling.small_models import make_checkpoint
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.encoders.encoder import load_encoder
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers import triton_linear as triton_experts
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels


@pytest.fixture
def launched(monkeypatch):
    modules = (triton_backend, triton_experts, triton_linear, triton_ops, sampler_kernels)
    return use_kernels_on_meta(monkeypatch, modules)


def make_runner(model):
    backend = make_attention_backend("auto", model.config, 16, META)
    sampler = DeviceSampler(TritonSamplerKernels(), MetaLink())
    return ModelRunner(
        model, backend, InputBatch(4, 128, 16), 20, parts=RunnerParts(device=META, device_sampler=sampler)
    )


@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "ModernBert"])
@torch.inference_mode()
def test_encoders(name, tmp_path):
    make_checkpoint(tmp_path, f"{name}ForSequenceClassification", num_labels=3)
    encoder = load_encoder(tmp_path, "bfloat16", META)
    ids, positions, types = (torch.zeros(9, dtype=torch.int64, device=META) for _ in range(3))
    assert encoder.forward(ids, positions, types, [0, 4, 9]).device == META


def test_log_probabilities_of_prompts(launched, save_checkpoint):
    model = load_model(save_checkpoint("llama"), "bfloat16", META, make_ops("auto", META))
    runner, params = make_runner(model), CoreSamplingParams(max_tokens=4, seed=1, prompt_logprobs=2)
    new = NewRequestData("a", list(range(20)), [], params, [1, 2], 0)
    runner.execute(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 20}, 20, [], []))
    assert "logprobs" in launched
