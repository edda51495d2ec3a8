"""Steps from graphs of padded sizes give what the same steps computed one by one give, with the kernels of a GPU."""

import pytest
import torch

from tests.gpu_worker.cuda.late_link import LateLink
from tests.parity.state_checkpoints import write_model
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
    StateRun,
    await_output,
)
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.states import StateSlots
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.cuda.device_steps import make_device_steps
from tokenloom.gpu_worker.cuda.row_kernels import TritonRowKernels
from tokenloom.gpu_worker.cuda.step_tensors import StepTools
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

CPU = torch.device("cpu")
PROMPTS = {"a": [7, 30, 12], "b": [40, 2], "c": list(range(50, 70))}
BLOCKS = {"a": [3, 1], "b": [6], "c": [5, 0]}


class Replays:
    """Runs the call again: what it reads and writes lies where it lay when it was captured."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def __call__(self, compute):
        self.num_captures += 1
        compute()
        outer = self

        class Graph:
            def replay(self):
                outer.num_replays += 1
                self.results = compute()

        return Graph()

    def forget(self):
        pass


@pytest.fixture
def model(save_checkpoint):
    path = save_checkpoint("qwen3", num_hidden_layers=2, head_dim=16)
    return load_model(path, "float32", ops=TritonOps())


def generate(model, make_recorded, states=None, prompts=PROMPTS, blocks=BLOCKS, cached=None):
    """Three requests that end one after the other. Returns their tokens. ``states``: of their layers, a slot each;
    ``cached``: how many tokens of a request lie in the cache."""
    backend, batch = TritonBackend(model.config, 16, CPU), InputBatch(4, 64, 16)
    parts = RunnerParts(recordings=make_recorded(backend, batch), states=states)
    runner = ModelRunner(model, backend, batch, num_blocks=8, parts=parts)

    def runs(counts, first=False):
        slots = {name: slot for slot, name in enumerate(prompts)}
        return [StateRun(name, count, -1 if first else slots[name], slots[name]) for name, count in counts.items()]

    outputs, cached = {name: [] for name in prompts}, cached or dict.fromkeys(prompts, 0)
    params = CoreSamplingParams(max_tokens=9, seed=1, temperature=0.0)
    news = [NewRequestData(name, prompts[name], [], params, blocks[name], cached[name]) for name in prompts]
    counts = {name: len(prompt) - cached[name] for name, prompt in prompts.items()}
    step = SchedulerOutput(news, CachedRequestData([], [], [], {}), counts, sum(counts.values()), [], [])
    step.state_runs = runs(counts, first=True)
    for going in (3, 3, 2, 1):
        runner.execute(step)
        output = await_output(runner.sample())
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            outputs[name] += tokens
        names = list(prompts)[:going]
        computed = [len(prompts[name]) + len(outputs[name]) - 1 for name in names]
        cached = CachedRequestData(names, [[] for _ in names], computed, {})
        finished = [name for name in output.req_ids if name not in names]
        step = SchedulerOutput([], cached, dict.fromkeys(names, 1), len(names), finished, [])
        step.state_runs = runs(dict.fromkeys(names, 1))
    return outputs


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # rows of padding, which nothing reads
def test_the_same_tokens_with_graphs(model):
    link = LateLink()
    captures = [Replays(), None]

    def make(capture):
        return lambda backend, batch: make_device_steps(
            backend, batch, 40, CPU, StepTools(link, TritonRowKernels()), capture
        )

    expected = generate(model, lambda backend, batch: None)
    assert generate(model, make(captures[0])) == expected
    # The prompts take the graph of 32 tokens; then come steps of 3, 3 and 2 requests, the first two of the same graph.
    assert (captures[0].num_captures, captures[0].num_replays) == (3, 4)
    assert link.num_sends == 4, "one copy to the device a step"
    assert generate(model, make(None)) == expected
    assert link.num_sends == 8


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("shares", [False, True])
def test_the_same_tokens_where_decodes_read_shared_keys_together(shares, model, monkeypatch):
    """Two of three requests begin alike, and one computes what the other reads."""
    limits = {"FEWEST_SHARING": 2, "_FEWEST_SHARED": 32, "_LEAST_SAVED": 0}
    for name, limit in limits.items():
        monkeypatch.setattr(triton_backend, name, limit)
    begin = list(range(100, 132))
    requests = {
        "prompts": {"a": [*begin, 7, 30, 12], "b": [*begin, 40], "c": list(range(50, 70))},
        "blocks": {"a": [3, 1, 5], "b": [3, 1, 4], "c": [6, 0]},
        "cached": {"a": 0, "b": 32, "c": 0},
    }
    capture, link, made = Replays(), LateLink(), []

    def make(backend, batch):
        tools = StepTools(link, TritonRowKernels())
        made.append(make_device_steps(backend, batch, 64, CPU, tools, capture, shares=shares))
        return made[0]

    expected = generate(model, lambda backend, batch: None, **requests)
    assert generate(model, make, **requests) == expected
    assert link.num_sends == 4, "one copy to the device a step"
    sizes = list(made[0]._graphs._graphs)
    assert [(size.step.requests, size.shared is not None) for size in sizes if size.is_decode] == [
        (4, shares),
        (2, shares),
    ]
    assert (capture.num_captures, capture.num_replays) == (3, 4)
    few = made[0]._graphs.sizes
    assert len(few) == (7 if shares else 5), "two sizes of steps with prompts, and of 4, 2 and 1 decodes"
    assert not any(size.shared for size in few if size.step.requests == 1)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("with_graphs", [False, True])
def test_the_same_tokens_where_layers_keep_a_state(with_graphs, tmp_path):
    """Decodes have graphs, which write padding to the slot that no request has, and so does their capture."""
    path, capture, link = write_model("qwen3_5_text", tmp_path), Replays(), LateLink()

    def make(backend, batch):
        return make_device_steps(
            backend, batch, 40, CPU, StepTools(link, TritonRowKernels()), capture if with_graphs else None
        )

    plain = load_model(path, "float32", ops=TorchOps())
    expected = generate(plain, lambda backend, batch: None, StateSlots(plain.config, 3, CPU))
    slots, model = StateSlots(plain.config, 3, CPU), load_model(path, "float32", ops=TritonOps())
    found = generate(model, make, slots)
    assert found == expected
    assert link.num_sends == 4, "one copy to the device a step"
    # The prompts have no graph; then come steps of 3, 3 and 2 requests.
    assert (capture.num_captures, capture.num_replays) == ((2, 3) if with_graphs else (0, 0))
    assert all(layer is None or layer.conv[:3].any(-1).any(-1).all() for layer in slots.layers)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_graphs_of_states_wait_for_the_slots(tmp_path):
    """Of an engine asleep the weights may come back first."""
    model, capture = load_model(write_model("qwen3_5_text", tmp_path), "float32", ops=TritonOps()), Replays()
    backend, batch = TritonBackend(model.config, 16, CPU), InputBatch(1, 64, 16)
    steps = make_device_steps(backend, batch, 1, CPU, StepTools(LateLink(), TritonRowKernels()), capture)
    parts = RunnerParts(recordings=steps, states=StateSlots(model.config, 1, CPU))
    runner = ModelRunner(model, backend, batch, num_blocks=8, parts=parts)
    runner.drop_states()
    runner.record_ahead()
    assert capture.num_captures == 0
    runner.make_states()
    runner.record_ahead()
    assert capture.num_captures == 1


def test_other_backends_compute_their_steps_as_ever(model):
    backend, tools = make_attention_backend("torch", model.config, 16, CPU), StepTools(LateLink(), TritonRowKernels())
    assert make_device_steps(backend, InputBatch(4, 64, 16), 40, CPU, tools, Replays()) is None
