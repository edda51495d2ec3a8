"""A drawn token is a function of logits, parameters, seed and output index: of nothing that the engine decides."""

import pytest

from tests.parity.engine import Engine
from tests.parity.reference import NUM_TOKENS, Reference

SAMPLING = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
}


def draw(reference: Reference, **settings) -> tuple[list[list[int]], Engine]:
    engine = Engine(reference.path, **settings)
    prompts = sorted((case.prompt for case in reference.cases), key=len)
    return engine.generate(prompts, [NUM_TOKENS] * len(prompts), **SAMPLING), engine


pytestmark = pytest.mark.parametrize("reference", ["llama", "demo"], indirect=True, scope="session")
"""How tokens are drawn does not depend on the model; a random one and a trained one have different distributions."""


@pytest.fixture(scope="module")
def alone(reference):
    tokens, _ = draw(reference, max_num_seqs=1)
    assert all(len(output) == NUM_TOKENS for output in tokens)
    assert tokens != [case.tokens for case in sorted(reference.cases, key=lambda case: len(case.prompt))]
    return tokens


@pytest.mark.parametrize(
    "settings",
    [{}, {"budget": 64}, {"prefix_caching": True}],
    ids=["together", "chunked", "prefix cache"],
)
def test_batching_changes_no_drawn_token(reference, alone, settings):
    tokens, _ = draw(reference, **settings)
    assert tokens == alone


def test_preemption_changes_no_drawn_token(reference, alone):
    tokens, engine = draw(reference, num_blocks=42, budget=256)
    assert engine.stats.num_preemptions >= 3
    assert tokens == alone
