"""Whatever drafts come, the tokens and log probabilities are those without drafts."""

import random

import numpy as np
import pytest

from tests.gpu_worker.sampler.device.host_draw import make_device_sampler
from tests.gpu_worker.speculation.steps import Driver
from tokenloom.engine_core.data.core_params import CoreSamplingParams

VOCAB = 2048
NUM_TOKENS = 24


def params(seed, **entries):
    return CoreSamplingParams(**({"max_tokens": 100, "seed": seed, "temperature": 0.0} | entries))


PLAIN = {
    "greedy": ([7, 300, 12, 45, 99, 8], params(1)),
    "drawn": ([400, 2, 5], params(2, temperature=1.0)),
    "filtered": (list(range(50, 90)), params(3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)),
}
STATEFUL = {
    "penalized": ([9, 9, 12], params(4, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.2)),
    "logprobs": ([7, 300, 12], params(5, temperature=1.0, logprobs=3, logprob_token_ids=[17])),
    "biased": ([31, 4], params(6, temperature=1.0, logit_bias={40: 3.0}, allowed_token_ids=[*range(30, 90)])),
    "stopped": ([31, 8], params(7, min_tokens=20, stop_token_ids=(2, 0))),
    "bad words": ([400, 2, 5], params(8, temperature=1.2, bad_words=[[40, 41], [60]])),
}


@pytest.fixture(scope="module")
def reference(model):
    driver = Driver(model)
    tokens = driver.generate(PLAIN | STATEFUL, NUM_TOKENS + 8)
    return tokens, driver.logprobs


def make_draft(truth, rate, seed=0):
    """Drafts of which each is right with a probability of ``rate``."""
    rng = random.Random(seed)

    def draft(name, output):
        tokens = truth[name][len(output) : len(output) + rng.randint(0, 6)]
        return [token if rng.random() < rate else rng.randrange(VOCAB) for token in tokens]

    return draft


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("requests", [PLAIN, PLAIN | STATEFUL], ids=["plain", "all"])
def test_drafts_change_no_token(model, reference, rate, requests):
    truth, logprobs = reference
    driver = Driver(model)
    outputs = driver.generate(requests, NUM_TOKENS, make_draft(truth, rate))
    for name, tokens in outputs.items():
        assert tokens[:NUM_TOKENS] == truth[name][:NUM_TOKENS]
    for name, found in driver.logprobs.items():
        assert len(found.sampled) == len(outputs[name])
        expected, count = logprobs[name], NUM_TOKENS * 4
        assert found.rank[:NUM_TOKENS] == expected.rank[:NUM_TOKENS]
        assert found.token_ids[:count] == expected.token_ids[:count]
        np.testing.assert_allclose(found.logprobs[:count], expected.logprobs[:count], atol=1e-4)
    assert (driver.steps < NUM_TOKENS) == (rate > 0.0)


def test_a_device_draws_the_same(model, reference):
    driver = Driver(model)
    driver.runner._sampler.device_sampler = make_device_sampler()
    outputs = driver.generate(PLAIN, NUM_TOKENS, make_draft(reference[0], 0.8))
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == {
        name: reference[0][name][:NUM_TOKENS] for name in PLAIN
    }


def test_a_grammar_masks_each_row(model):
    def grammar(name, output):
        allowed = np.zeros(VOCAB, dtype=bool)
        allowed[len(output) % 7 :: 7] = True
        return None if name == "drawn" else allowed

    requests = PLAIN | STATEFUL
    truth = Driver(model).generate(requests, NUM_TOKENS, grammar=grammar)
    assert all(token % 7 == place % 7 for place, token in enumerate(truth["greedy"]))
    outputs = Driver(model).generate(requests, NUM_TOKENS, make_draft(truth, 0.8), grammar=grammar)
    assert {name: tokens[:NUM_TOKENS] for name, tokens in outputs.items()} == truth


def test_a_request_with_fewer_mask_rows_draws_fewer_tokens(model, reference):
    truth, driver = reference[0], Driver(model)
    masks = driver._masks
    driver._masks = lambda grammar, lengths, outputs, drafts: masks(
        grammar, lengths, outputs, {name: drafts[name][:1] for name in drafts}
    )
    everything = np.ones(VOCAB, dtype=bool)
    outputs = driver.generate(
        PLAIN, 9, lambda name, output: truth[name][len(output) :][:4], grammar=lambda name, output: everything
    )
    assert {name: len(tokens) for name, tokens in outputs.items()} == dict.fromkeys(PLAIN, 9)  # 1 and 4 times 2
    assert all(tokens == truth[name][:9] for name, tokens in outputs.items())


class SpoiltModel:
    """Gives NaN instead of all logits of the row whose token is ``bad``."""

    def __init__(self, model, bad):
        self.config, self._model, self._bad = model.config, model, bad

    def forward(self, input_ids, *args):
        self._ids = input_ids
        return self._model.forward(input_ids, *args)

    def compute_logits(self, hidden):
        logits = self._model.compute_logits(hidden)
        if len(logits) == len(self._ids):
            logits[self._ids == self._bad] = float("nan")
        return logits


@pytest.mark.parametrize("entries", [{}, {"logprobs": 2}], ids=["at once", "in passes"])
def test_a_row_without_a_token_ends_the_accepted_drafts_before_it(model, entries):
    """The next step reports it, as it would without drafts."""
    requests = {"a": (list(range(50, 90)), params(3, temperature=1.0, **entries))}
    truth = Driver(model).generate(requests, NUM_TOKENS)["a"]
    place = next(place for place in range(1, 9) if truth[place] not in truth[:place])
    driver = Driver(SpoiltModel(model, truth[place]))
    runner, found = driver.runner, []
    sample = runner.sample

    def note(grammar=None):
        output = sample(grammar)
        found.append((list(output.sampled_token_ids[0]), list(output.without_finite_logit)))
        return output

    runner.sample = note
    calls = iter([truth[1:14], []])
    with pytest.raises(StopIteration):
        driver.generate(requests, NUM_TOKENS, lambda name, output: next(calls))
    assert found[0] == ([truth[0]], [])
    assert found[1] == (truth[1 : place + 1], [])
    assert found[2] == ([], ["a"])
