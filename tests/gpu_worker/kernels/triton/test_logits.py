"""The kernels around the draw do what the host does, for any mixture of requests."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.device.sampling_params import PARAMS
from tests.gpu_worker.sampler.device.sampling_steps import VOCAB, Steps, bitmask, check_equal
from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.batch import prompt_rows as prompt_logprobs
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels
from tokenloom.gpu_worker.sampler.host.logprobs import logprobs_of


def make_sampler():
    return DeviceSampler(TritonSamplerKernels(width=64))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARAMS, min_size=1, max_size=3), st.sampled_from([(), (5,), tuple(range(0, 100, 3))]))
def test_any_mixture_draws_the_host_s_tokens(requests, allowed):
    device, host = Steps(requests, make_sampler()), Steps(requests, None)
    grammar = GrammarOutput(["r0"], bitmask(*allowed)) if allowed else None
    for _ in range(2):
        check_equal(device.run(grammar), host.run(grammar))


def test_all_changes_of_one_row():
    everything = {
        "temperature": 0.8,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {7: 3.0, 8: 2.5, 9: -1.0},
        "bad_words": ((8,), (2, 7)),
        "allowed_token_ids": tuple(range(60)),
        "min_tokens": 2,
        "stop_token_ids": (1, 50),
        "logprobs": 4,
        "logprob_token_ids": (99, 0),
    }
    requests = [{"temperature": 1.0}, everything, {"temperature": 0.0, "logprobs": 1}]
    device, host = Steps(requests, make_sampler()), Steps(requests, None)
    for step in range(3):
        forced = {"r1": 70} if step == 2 else {}
        grammar = GrammarOutput(["r1"], bitmask(*range(3, 40), 70), forced)
        found = device.run(grammar)
        check_equal(found, host.run(grammar))
    spoil = {1: float("-inf"), 2: float("nan")}
    check_equal(device.run(None, spoil), host.run(None, spoil))


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB + 9])
@pytest.mark.parametrize("values", ["different", "equal"])
def test_log_probabilities_of_given_tokens(num_top, values):
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 3, (3, VOCAB)) if values == "different" else rng.integers(0, 3, (3, VOCAB))
    logits = logits.astype(np.float32)
    token_ids = [7, 0, VOCAB - 1]
    positions = make_sampler().start_logprobs(torch.from_numpy(logits), token_ids, num_top).wait()
    found = prompt_logprobs.PromptPart(num_top, [prompt_logprobs.Positions(each) for each in positions]).wait()
    expected = logprobs_of(logits, token_ids, num_top)
    assert (found.rank, found.top, found.token_ids) == (expected.rank, expected.top, expected.token_ids)
    np.testing.assert_allclose(found.sampled, expected.sampled, atol=1e-5)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
