"""Log probabilities are transformers' own within 1e-4 (float32), however the work is cut, cached or interrupted."""

import numpy as np
import pytest
import torch
import transformers

from tests.parity.engine import Engine
from tests.parity.reference import MODELS, NUM_TOKENS
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, Logprobs

TOP = 5
ATOL = 1e-4
SETTINGS = {
    "together": {},
    "chunked": {"budget": 64},
    "prefix cache": {"prefix_caching": True, "budget": 256},
    "preempted": {"num_blocks": 42, "budget": 256, "prefix_caching": True},
}
CASES = [(model, name) for model in MODELS for name in SETTINGS if name == "together" or model in ("llama", "demo")]
"""How the work is cut does not depend on the model: a random one and a trained one are enough for that."""


@pytest.fixture(scope="module")
def log_softmax(reference):
    """Of each prompt followed by its greedy tokens: [prompt + tokens - 1, vocab] of what follows each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        reference.path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [
            model(torch.tensor([case.prompt + case.tokens])).logits[0, :-1].double().log_softmax(-1).numpy()
            for case in reference.cases
        ]


def run(engine: Engine, cases, **asked: object) -> list[tuple[list[int], Logprobs, Logprobs | None]]:
    """Tokens, their log probabilities, and the prompt's."""
    results = {}
    for index, case in enumerate(cases):
        params = CoreSamplingParams(
            max_tokens=NUM_TOKENS, seed=0, temperature=0.0, stop_token_ids=engine.stop_token_ids, **asked
        )
        results[str(index)] = ([], Logprobs([], []), [])
        engine.core.add_request(EngineCoreRequest(str(index), case.prompt, params))
    while engine.core.has_work():
        outputs = engine.core.step()
        engine.stats = outputs.scheduler_stats or engine.stats
        for output in outputs.outputs:
            tokens, logprobs, prompts = results[output.request_id]
            if output.new_prompt_logprobs is not None:
                assert not tokens, "with the first token"
                prompts.append(output.new_prompt_logprobs)
            tokens += output.new_token_ids
            if output.new_logprobs is not None:
                logprobs.extend(output.new_logprobs)
    assert all(len(prompts) <= 1 for *_, prompts in results.values()), "told once"
    return [(tokens, logprobs, prompts[0] if prompts else None) for tokens, logprobs, prompts in results.values()]


def assert_close(told: Logprobs, token_ids: list[int], expected: np.ndarray) -> None:
    """``expected`` [n, vocab] of the places where ``token_ids`` stand."""
    assert len(told.sampled) == len(told.rank) == len(token_ids) == len(expected)
    places = np.arange(len(token_ids))
    np.testing.assert_allclose(told.sampled, expected[places, token_ids], atol=ATOL)
    ids = np.array(told.token_ids, dtype=int).reshape(-1, told.top or 1)[: len(token_ids)]
    values = np.array(told.logprobs).reshape(ids.shape)
    np.testing.assert_allclose(values, expected[places[:, None], ids], atol=ATOL)
    best = np.sort(np.partition(expected, -ids.shape[1], axis=1)[:, -ids.shape[1] :], axis=1)[:, ::-1]
    np.testing.assert_allclose(values, best, atol=ATOL)


@pytest.mark.parametrize(("reference", "name"), CASES, indirect=["reference"], scope="session")
def test_logprobs_and_prompt_logprobs(reference, log_softmax, name):
    pairs = sorted(zip(reference.cases, log_softmax, strict=True), key=lambda pair: len(pair[0].prompt))
    cases = [case for case, _ in pairs]
    engine = Engine(reference.path, stop_token_ids=reference.eos_token_ids, **SETTINGS[name])
    if name == "prefix cache":
        run(engine, cases)  # what such requests must not read
    results = run(engine, cases, logprobs=TOP, prompt_logprobs=TOP)
    if name == "preempted":
        assert engine.stats.num_preemptions >= 3
    for (case, expected), (tokens, logprobs, prompt_logprobs) in zip(pairs, results, strict=True):
        start = len(case.prompt) - 1
        assert_close(prompt_logprobs, case.prompt[1:], expected[:start])
        same = common_prefix(tokens, case.tokens)  # behind a near tie the reference went another way
        assert same >= 1
        assert_close(head(logprobs, same), tokens[:same], expected[start : start + same])
        assert logprobs.rank[:same] == [1] * same


def common_prefix(tokens: list[int], others: list[int]) -> int:
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def head(told: Logprobs, count: int) -> Logprobs:
    """Of the first ``count`` places."""
    end = count * told.top
    return Logprobs(told.sampled[:count], told.rank[:count], told.top, told.token_ids[:end], told.logprobs[:end])


def test_nobody_is_told_unasked(reference):
    engine = Engine(reference.path)
    for _, logprobs, prompt_logprobs in run(engine, reference.cases[:3]):
        assert logprobs == Logprobs([], [])
        assert prompt_logprobs is None


def test_the_whole_vocabulary(reference, log_softmax):
    """More than it holds asks for all of it; the edge makes this of vLLM's -1."""
    engine = Engine(reference.path)
    case, expected = reference.cases[0], log_softmax[0]
    ((tokens, logprobs, prompt_logprobs),) = run(engine, [case], logprobs=2**31, prompt_logprobs=2**31)
    vocab = expected.shape[1]
    assert logprobs.top == vocab
    start = len(case.prompt) - 1
    for told, rows in ((logprobs, expected[start : start + len(tokens)]), (prompt_logprobs, expected[:start])):
        probabilities = np.exp(np.array(told.logprobs).reshape(-1, vocab))
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)
        assert len(probabilities) == len(rows)
