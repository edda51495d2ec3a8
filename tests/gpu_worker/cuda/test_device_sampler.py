"""Which rows a step draws on the device, and which on the host."""

import numpy as np
import pytest
import torch

from tests.gpu_worker.cuda.host_draw import host_draw
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.cuda.sampler import DeviceSampler
from tokenloom.gpu_worker.sampler import NO_TOKEN, Sampler, step_sampler
from tokenloom.gpu_worker.sampler.step_sampler import StepSampler

VOCAB = 100
PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.9},
    "penalized": {"temperature": 1.0, "frequency_penalty": 0.5},
    "constrained": {"temperature": 1.0},
    "measured": {"temperature": 0.7, "logprobs": 2},
}


def make_step(names, device_sampler, grammar=None, spoil=None):
    """A step in which each of these requests draws its first token."""
    batch = InputBatch(8, 64, 16)
    news = [
        NewRequestData(name, [1, 2], [], SamplingParams(max_tokens=4, seed=index, **PARAMS[name]), [index], 0)
        for index, name in enumerate(PARAMS)
        if name in names
    ]
    counts = {new.req_id: 2 for new in news}
    batch.update(SchedulerOutput(news, CachedRequestData([], [], [], {}), counts, 2 * len(news), [], []))
    inputs = batch.prepare(counts)
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 2, (len(news), VOCAB)).astype(np.float32))
    if spoil is not None:
        logits[spoil] = float("nan")
    output = ModelRunnerOutput(inputs.req_ids, [])
    StepSampler(batch, device_sampler).sample(inputs, logits, grammar, output)
    return output


@pytest.fixture
def fetched(monkeypatch):
    """How many rows of logits came to the host in each step."""
    rows = []
    draw = step_sampler.StepSampler._draw_on_host

    def counted(self, inputs, places, on_device, *others):
        rows.append(len(on_device))
        return draw(self, inputs, places, on_device, *others)

    monkeypatch.setattr(step_sampler.StepSampler, "_draw_on_host", counted)
    return rows


def bitmask(*token_ids):
    allowed = np.zeros(128, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)[None]


@pytest.mark.parametrize(
    ("names", "num_hosted"),
    [
        (["greedy", "drawn"], 0),
        (["greedy", "penalized"], 1),
        (["greedy", "drawn", "constrained"], 1),
        (list(PARAMS), 3),
        (["measured"], 1),
    ],
)
def test_only_rows_that_ask_for_more_come_to_the_host(names, num_hosted, fetched):
    grammar = GrammarOutput(["constrained"], bitmask(5, 9)) if "constrained" in names else None
    found = make_step(names, DeviceSampler(host_draw), grammar)
    assert sum(fetched) == num_hosted
    expected = make_step(names, None, grammar)
    assert found == expected
    assert all(len(tokens) == 1 for tokens in found.sampled_token_ids)


def test_a_row_without_a_token_beside_one_of_the_host(fetched):
    found = make_step(["greedy", "drawn", "measured"], DeviceSampler(host_draw), spoil=1)
    assert found == make_step(["greedy", "drawn", "measured"], None, spoil=1)
    assert found.without_finite_logit == ["drawn"]


def test_the_device_gets_the_numbers_of_the_host():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (40, VOCAB)).astype(np.float32)
    logits[7] = np.nan
    params = [
        SamplingParams(max_tokens=4, seed=row, **list(PARAMS.values())[row % 2], top_k=row % 3 * 10)
        for row in range(40)
    ]
    indices = rng.integers(0, 1 << 40, 40)
    found = DeviceSampler(host_draw).sample(torch.from_numpy(logits), params, indices)
    assert found == Sampler().sample(logits, params, indices)
    assert found[7] == NO_TOKEN
