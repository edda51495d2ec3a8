import numpy as np

from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.sampler.step_sampler import allow_only, force


def test_only_what_the_bits_allow_is_left() -> None:
    bitmask = np.zeros((2, 3), dtype=np.int32)
    bitmask[0, 0] = 0b101
    bitmask[1, 1] = np.int32(-(1 << 31))  # token 63
    bitmask[1, 2] = 0b11110  # tokens 65 to 68, of which the vocabulary has two
    logits = np.arange(3 * 67, dtype=np.float32).reshape(3, 67)
    untouched = logits[1].copy()
    allow_only(GrammarOutput(["c", "a"], bitmask), ["a", "b", "c"], logits)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [63, 65, 66]
    assert np.flatnonzero(np.isfinite(logits[2])).tolist() == [0, 2]
    assert logits[2, 2] == 2 * 67 + 2
    np.testing.assert_array_equal(logits[1], untouched)


def test_a_grammar_of_a_request_that_another_call_draws_for_is_passed_over() -> None:
    """The device draws for most requests of a step, the host for the rest."""
    bitmask = np.array([[0b1], [0b10]], dtype=np.int32)
    logits = np.zeros((1, 5), dtype=np.float32)
    allow_only(GrammarOutput(["a", "b"], bitmask), ["b"], logits)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [1]


def test_a_forced_token_is_left_whatever_was_forbidden() -> None:
    grammar = GrammarOutput(["b"], np.zeros((1, 1), dtype=np.int32), {"b": 3})
    logits = np.full((2, 5), -np.inf, dtype=np.float32)
    logits[0] = np.nan
    untouched = logits[0].copy()
    force(grammar, ["a", "b"], logits)
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == [3]
    np.testing.assert_array_equal(logits[0], untouched)
