"""Between two decode steps: one copy to the device, one back, and no waiting but for the tokens."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.gpu_worker.kernels.triton.meta_launch import META, use_kernels_on_meta
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput, await_output
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.cuda import row_kernels
from tokenloom.gpu_worker.cuda.device_steps import make_device_steps
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.device.device_link import Past
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers import triton_linear as triton_experts
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels

KINDS = ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1})


class Event:
    """Occurs when it is waited for."""

    def __init__(self, link):
        self._link, self._occurred = link, False

    def query(self):
        return self._occurred

    def synchronize(self):
        self._link.log.append("wait")
        self._occurred = True


class MetaLink:
    """Fulfils ``DeviceLink`` for a device without content, whose tokens are zeros."""

    def __init__(self):
        self.log = []

    def host_memory(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, target, source):
        self.log.append("send")
        target.copy_(source)

    def fetch(self, target, source):
        assert source.device == META
        self.log.append("fetch")

    def event(self):
        # That of a copy to the device has occurred by the time its memory is written again.
        return Event(self) if self.log[-1] == "fetch" else Past()


class Crossings(TorchDispatchMode):
    """Logs every operation that reads one device and writes another; refuses to read a value of a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a value"
        results = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs or {}, results)) if isinstance(each, torch.Tensor)]
        if len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
            self.found.append(func.__name__)
        return results


@pytest.fixture
def launched(monkeypatch):
    modules = (row_kernels, sampler_kernels, triton_backend, triton_experts, triton_linear, triton_ops)
    return use_kernels_on_meta(monkeypatch, modules)


def make_runner(path, link):
    model = load_model(path, "bfloat16", META, make_ops("auto", META))
    backend, batch = make_attention_backend("auto", model.config, 16, META), InputBatch(4, 128, 16)
    recorded = make_device_steps(backend, batch, 64, META, StepTools(link, TritonRowKernels()), None)
    sampler = DeviceSampler(TritonSamplerKernels(), link)
    return ModelRunner(
        model, backend, batch, 32, parts=RunnerParts(device=META, device_sampler=sampler, recordings=recorded)
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_one_copy_and_no_waiting(model_type, launched, save_checkpoint):
    link = MetaLink()
    runner = make_runner(save_checkpoint(model_type), link)
    news = [
        NewRequestData(str(index), [1] * 14, [], CoreSamplingParams(max_tokens=9, seed=index, **kind), [index], 0)
        for index, kind in enumerate(KINDS)
    ]
    counts = {new.req_id: 14 for new in news}
    runner.execute(SchedulerOutput(news, CachedRequestData([], [], [], {}), counts, sum(counts.values()), [], []))
    pending = [runner.sample()]
    names = list(counts)
    for computed in range(14, 20):  # a new block of each request on the way
        link.log.clear()
        launched.clear()
        blocks = [[10 + index] if computed == 16 else [] for index in range(3)]
        cached = CachedRequestData(names, blocks, [computed] * 3, {})
        with Crossings() as crossings:
            runner.execute(SchedulerOutput([], cached, dict.fromkeys(names, 1), 3, [], []))
            pending.append(runner.sample())
        assert crossings.found == ["copy_.default"]
        # The oldest step's tokens are waited for only because this test does not take them before the next step.
        assert link.log == ["wait", "send", "fetch"][1 if computed == 14 else 0 :]
        assert launched.count("prepare_step") == launched.count("sample") == 1
        assert launched.count("scatter") == (1 if computed == 16 else 0)
    for each in pending:
        assert await_output(each).sampled_token_ids == [[0]] * 3


def test_tokens_that_were_taken_are_not_waited_for_again(launched, save_checkpoint):
    link = MetaLink()
    runner = make_runner(save_checkpoint("llama"), link)
    new = NewRequestData("a", [1] * 5, [], CoreSamplingParams(max_tokens=9, seed=1), [3], 0)
    runner.execute(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 5}, 5, [], []))
    for computed in range(5, 9):
        pending = runner.sample()
        await_output(pending)
        assert link.log == ["send", "fetch", "wait"]
        link.log.clear()
        runner.execute(SchedulerOutput([], CachedRequestData(["a"], [[]], [computed], {}), {"a": 1}, 1, [], []))


def test_what_rows_ask_for_beside_a_token_is_one_more_copy(launched, save_checkpoint):
    link = MetaLink()
    runner = make_runner(save_checkpoint("llama"), link)
    asking = {"frequency_penalty": 1.0, "logit_bias": {3: 1.0}, "allowed_token_ids": (0, 3), "logprobs": 2}
    news = [
        NewRequestData(str(index), [1] * 5, [], CoreSamplingParams(max_tokens=9, seed=index, **kind), [index], 0)
        for index, kind in enumerate(({}, asking))
    ]
    counts = {new.req_id: 5 for new in news}
    runner.execute(SchedulerOutput(news, CachedRequestData([], [], [], {}), counts, 10, [], []))
    pending = [runner.sample()]
    for computed in range(5, 9):
        link.log.clear()
        launched.clear()
        cached = CachedRequestData(list(counts), [[], []], [computed] * 2, {})
        with Crossings() as crossings:
            runner.execute(SchedulerOutput([], cached, dict.fromkeys(counts, 1), 2, [], []))
            pending.append(runner.sample())
        assert crossings.found == ["copy_.default", "to.dtype_layout"], computed
        assert link.log.count("send") == 1
        sampling = [
            name for name in launched if name in ("add_listed", "change_rows", "sample", "count_drawn", "logprobs")
        ]
        assert sampling == ["add_listed", "change_rows", "sample", "count_drawn", "logprobs"]
    for each in pending:
        assert await_output(each).logprobs.keys() == {"1"}
