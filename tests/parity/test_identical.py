"""The rule itself: what it lets pass, and that it can fail."""

import numpy as np
import pytest

from tests.parity.identical import Case, assert_identical

VOCAB = 50


def make_case(seed, length=2000):
    """The reference's tokens are the best of random logits; at position 7 the second best is very near."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((length, VOCAB)).astype(np.float32) * 5
    best = logits.argmax(axis=1)
    logits[7, (best[7] + 1) % VOCAB] = logits[7, best[7]] - 5e-5
    return Case([seed], best.tolist(), logits)


CASES = [make_case(1), make_case(2)]


class Engine:
    """Gives the reference's tokens but for one; all after it differ until the prefix is the reference's."""

    def __init__(self, wrong=None):
        self.wrong = wrong or {}
        self.prompts = []

    def __call__(self, prompts, counts):
        return [self._one(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]

    def _one(self, prompt, count):
        self.prompts.append(prompt)
        case = next(case for case in CASES if case.prompt == prompt[:1])
        start = len(prompt) - 1
        tokens = case.tokens[start : start + count]
        for position, token in self.wrong.items():
            if start <= position < start + count:
                tokens[position - start] = token
                tokens[position - start + 1 :] = [VOCAB + 1] * len(tokens[position - start + 1 :])
        return tokens


def test_the_same_tokens_pass():
    assert_identical(CASES, Engine())


def test_a_near_tie_passes_is_printed_and_the_rest_is_compared_behind_the_reference(capsys):
    engine = Engine({7: (CASES[0].tokens[7] + 1) % VOCAB})
    assert_identical(CASES[:1], engine)
    assert "output position 7" in capsys.readouterr().out
    assert engine.prompts[1] == [1, *CASES[0].tokens[:8]]


def test_another_token_fails():
    with pytest.raises(AssertionError, match="output position 12: "):
        assert_identical(CASES[:1], Engine({12: int(CASES[0].logits[12].argmin())}))


def test_a_difference_behind_a_near_tie_fails():
    wrong = {7: (CASES[0].tokens[7] + 1) % VOCAB, 30: int(CASES[0].logits[30].argmin())}
    with pytest.raises(AssertionError, match="output position 30: "):
        assert_identical(CASES[:1], Engine(wrong))


def test_ending_early_or_late_fails():
    with pytest.raises(AssertionError, match="ended here"):
        assert_identical(CASES, lambda prompts, counts: [case.tokens[:-1] for case in CASES])
    with pytest.raises(AssertionError, match="the reference ended here"):
        assert_identical(CASES, lambda prompts, counts: [[*case.tokens, 3] for case in CASES])


def test_too_many_near_ties_fail():
    case = make_case(1, length=900)
    wrong = (case.tokens[7] + 1) % VOCAB

    def generate(prompts, counts):
        start = len(prompts[0]) - 1
        tokens = case.tokens[start:]
        return [tokens if start > 7 else [*tokens[:7], wrong, *tokens[8:]]]

    with pytest.raises(AssertionError, match="1 near ties in 900"):
        assert_identical([case], generate)
