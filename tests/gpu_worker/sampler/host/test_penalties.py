"""Sparse penalties against the plain reference."""

import numpy as np
import pytest

from tests.gpu_worker.sampler.host import reference
from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logits_processor import SeenTokens
from tokenloom.gpu_worker.sampler.host.logits_processors import make_logits_processors

VOCAB = 300


def params(**values):
    return CoreSamplingParams(max_tokens=16, seed=1, **values)


def random_logits(generator):
    return (generator.standard_normal(VOCAB) * 3).astype(np.float32)


PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.5},
    "all": {"repetition_penalty": 0.7, "presence_penalty": -1.0, "frequency_penalty": 0.25},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_the_reference(name):
    generator = np.random.default_rng(11)
    prompt, output = generator.integers(0, 300, 50).tolist(), generator.integers(0, 300, 200).tolist()
    chosen = params(**PENALTIES[name])
    logits = random_logits(generator)
    expected = reference.penalized(logits, chosen, prompt, output)
    seen = SeenTokens(prompt, output[:20])
    for token in output[20:]:
        seen.append(token)
    seen.penalize(logits, chosen)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)


def test_a_token_of_the_prompt_alone_is_repeated_but_not_frequent():
    seen = SeenTokens([5])
    logits = np.ones(VOCAB, dtype=np.float32)
    seen.penalize(logits, params(presence_penalty=1.0, frequency_penalty=1.0))
    assert (logits == 1).all()
    seen.penalize(logits, params(repetition_penalty=2.0))
    assert logits[5] == 0.5


def test_penalties_of_any_size_raise_no_warning():
    logits = np.array([1.0, -3.0, 2.0], dtype=np.float32)
    SeenTokens([0, 1]).penalize(logits, params(repetition_penalty=1e-300))
    assert logits[0] == np.inf


def test_penalties_reach_their_own_rows_only():
    logits = np.tile(np.array([1.0, 3.0, 2.0], dtype=np.float32), (2, 1))
    processors = make_logits_processors()
    processors.add(5, params(temperature=0.0, repetition_penalty=2.0), [1], 1)
    processors.add(3, params(temperature=0.0), [1], 1)
    processors.apply(logits, np.array([5, 3]))
    assert logits.tolist() == [[1.0, 1.5, 2.0], [1.0, 3.0, 2.0]]
