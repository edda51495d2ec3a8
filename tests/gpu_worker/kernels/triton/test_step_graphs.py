"""Decode steps from graphs of padded sizes give what the same steps computed one by one give."""

import numpy as np
import pytest
import torch

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.batch.input_batch import InputBatch, StepInputs
from tokenloom.gpu_worker.cuda import step_buffers
from tokenloom.gpu_worker.cuda.step_graphs import StepGraphs, make_step_graphs, row_buckets
from tokenloom.gpu_worker.model_runner import ModelRunner
from tokenloom.gpu_worker.models.architectures import load_model
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
                compute()

        return Graph()


@pytest.fixture
def model(save_checkpoint):
    path = save_checkpoint("qwen3", num_hidden_layers=2, head_dim=16)
    return load_model(path, "float32", ops=TritonOps())


def generate(model, recorded):
    """Three requests that end one after the other. Returns their tokens."""
    backend = TritonBackend(model.config, 16, CPU)
    runner = ModelRunner(model, backend, InputBatch(4, 64, 16), num_blocks=8, recorded=recorded)
    outputs = {name: [] for name in PROMPTS}
    news = [
        NewRequestData(name, PROMPTS[name], [], SamplingParams(max_tokens=9, seed=1, temperature=0.0), BLOCKS[name], 0)
        for name in PROMPTS
    ]
    counts = {name: len(prompt) for name, prompt in PROMPTS.items()}
    step = SchedulerOutput(news, CachedRequestData([], [], [], {}), counts, sum(counts.values()), [], [])
    for going in (3, 3, 2, 1):
        runner.execute(step)
        output = runner.sample()
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            outputs[name] += tokens
        names = list(PROMPTS)[:going]
        computed = [len(PROMPTS[name]) + len(outputs[name]) - 1 for name in names]
        cached = CachedRequestData(names, [[] for _ in names], computed, {})
        finished = [name for name in output.req_ids if name not in names]
        step = SchedulerOutput([], cached, dict.fromkeys(names, 1), len(names), finished, [])
    return outputs


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # rows of padding, which nothing reads
def test_the_same_tokens_with_graphs(model, monkeypatch):
    capture, sent = Replays(), []
    send = step_buffers.StepBuffers.send
    monkeypatch.setattr(step_buffers.StepBuffers, "send", lambda self: sent.append(send(self)))
    graphs = make_step_graphs(TritonBackend(model.config, 16, CPU), 4, 4, CPU, capture)
    assert isinstance(graphs, StepGraphs)
    assert generate(model, graphs) == generate(model, None)
    # Steps of 3, 3 and 2 requests: the first two take the graph of 4 rows.
    assert (capture.num_captures, capture.num_replays) == (2, 3)
    assert len(sent) == 3, "one copy to the device a step"


def test_steps_that_are_no_decodes_are_computed_one_by_one(model):
    graphs = StepGraphs(TritonBackend(model.config, 16, CPU), 2, 4, CPU, Replays())

    def step(num_tokens, num_requests, embeds=()):
        tokens, rows = np.zeros(num_tokens, dtype=np.int64), np.arange(num_requests)
        return StepInputs([], rows, tokens, tokens, rows, rows + 1, rows[:, None], tokens, rows, embeds)

    assert graphs.compute(model, step(3, 2), []) is None, "a prompt"
    assert graphs.compute(model, step(3, 3), []) is None, "more requests than the largest graph has"
    assert graphs.compute(model, step(1, 1, [(0, tokens := np.zeros((1, 64)))]), []) is None, tokens
    assert graphs.compute(model, step(1, 1), [], adapted=True) is None


def test_sizes_of_graphs():
    assert row_buckets(1) == [1]
    assert row_buckets(3) == [1, 2, 3]
    assert row_buckets(128) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128]


def test_other_backends_have_no_graphs(model):
    assert make_step_graphs(make_attention_backend("torch", model.config, 16, CPU), 4, 4, CPU, Replays()) is None
