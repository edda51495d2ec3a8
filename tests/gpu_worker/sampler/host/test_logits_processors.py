"""Each kind of logits processor: what it masks or changes, of which rows, through preemptions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.host import reference
from tests.gpu_worker.sampler.host.processing import OneRow
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logits_processors import LogitsProcessors, SeenTokens, make_logits_processors


def test_nothing_else_may_be_drawn():
    row = OneRow(allowed_token_ids=(4, 1))
    assert row.apply([1.0, 2.0, 3.0, 4.0, 5.0]) == [float("-inf"), 2.0, float("-inf"), float("-inf"), 5.0]
    row.append(4)
    assert row.masked(5) == {0, 2, 3}


FEW_TOKENS = 4
TOKENS = st.integers(0, FEW_TOKENS - 1)


def closed_words(words, output):
    """As vLLM reads them."""
    return {word[-1] for word in words if len(word) == 1 or output[-(len(word) - 1) :] == list(word[:-1])}


def test_a_word_of_one_token_is_always_masked():
    assert OneRow(bad_words=((2,), (2,), (0,))).masked(FEW_TOKENS) == {0, 2}


def test_the_last_token_is_masked_when_all_before_it_stand_in_the_output():
    row = OneRow(prompt=[0, 1], bad_words=((0, 1, 2),))
    assert row.masked(FEW_TOKENS) == set()
    row.append(0)
    row.append(1)
    assert row.masked(FEW_TOKENS) == {2}
    row.append(3)
    assert row.masked(FEW_TOKENS) == set()


@pytest.mark.parametrize("num_accepted", [0, 1, 5])
def test_every_way_into_a_word_is_closed(num_accepted):
    words = ((1, 1), (0, 1, 0), (2,))
    output = [1, 0, 1, 3, 1, 0, 0]
    row = OneRow(output=output[:num_accepted], bad_words=words)
    for token in output[num_accepted:]:
        row.append(token)
    assert row.masked(FEW_TOKENS) == closed_words(words, output)


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    output=st.lists(TOKENS, max_size=12),
    data=st.data(),
)
def test_any_words_any_output_any_preemption(words, output, data):
    num_accepted = data.draw(st.integers(0, len(output)))
    row = OneRow(output=output[:num_accepted], bad_words=tuple(words))
    for length in range(num_accepted, len(output) + 1):
        assert row.masked(FEW_TOKENS) == closed_words(words, output[:length])
        if length < len(output):
            row.append(output[length])


@pytest.mark.parametrize("num_accepted", [0, 2])
def test_no_stop_token_before_there_are_so_many(num_accepted):
    row = OneRow(output=[7] * num_accepted, min_tokens=3, stop_token_ids=(2, 5))
    for _ in range(num_accepted, 3):
        assert row.masked(8) == {2, 5}
        row.append(7)
    assert row.masked(8) == set()


def test_tokens_of_earlier_attempts_may_be_enough():
    assert OneRow(output=[7] * 4, min_tokens=3, stop_token_ids=(2,)).masked(8) == set()


def test_without_stop_tokens_there_is_nothing_to_mask():
    assert OneRow(min_tokens=3).masked(8) == set()


def test_it_is_added_to_its_tokens():
    row = OneRow(logit_bias={3: -100.0, 0: 0.5})
    assert row.apply([1.0, 2.0, 3.0, 4.0]) == [1.5, 2.0, 3.0, -96.0]
    row.append(3)
    assert row.apply([1.0, 2.0, 3.0, 4.0]) == [1.5, 2.0, 3.0, -96.0]


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


PLAIN = CoreSamplingParams(max_tokens=9, seed=1)
BIASED = CoreSamplingParams(max_tokens=9, seed=1, logit_bias={2: 1.5})
EVERYTHING = CoreSamplingParams(
    max_tokens=9,
    seed=1,
    min_tokens=2,
    stop_token_ids=(1,),
    logit_bias={1: 100.0, 2: 10.0, 3: 1.0},
    allowed_token_ids=(1, 2, 3, 4),
    bad_words=((2,), (3, 4)),
    frequency_penalty=2.0,
)


class Recorder:
    """Notes the calls that it gets."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    parameters = ("logit_bias",)

    def add(self, row, params, prompt_token_ids, output_token_ids):
        self.log.append((self.name, "add", row, list(prompt_token_ids), list(output_token_ids)))

    def remove(self, row):
        self.log.append((self.name, "remove", row))

    def append(self, row, token_id):
        self.log.append((self.name, "append", row, token_id))

    def apply(self, logits, index_of):
        self.log.append((self.name, "apply", dict(index_of)))


@pytest.fixture
def log():
    return []


@pytest.fixture
def processors(log):
    return LogitsProcessors([Recorder(log, "first"), Recorder(log, "second")])


LOGITS = np.zeros((3, 5), dtype=np.float32)


def test_rows_that_do_not_ask_are_never_mentioned(processors, log):
    processors.add(0, PLAIN, [1, 2], 1)
    processors.append(np.array([0]), np.array([4]))
    processors.apply(LOGITS[:1], np.array([0]))
    processors.remove(0)
    assert log == []


def test_each_kind_hears_of_a_rows_life_in_order(processors, log):
    processors.add(7, BIASED, [1, 2, 3], 2)
    processors.add(1, PLAIN, [1], 1)
    processors.apply(LOGITS, np.array([1, 7, 4]))
    processors.append(np.array([1, 7, 4]), np.array([5, 6, 7]))
    processors.remove(7)
    processors.remove(7)
    processors.apply(LOGITS, np.array([1, 7, 4]))
    events = [("add", 7, [1, 2], [3]), ("apply", {7: 1}), ("append", 7, 6), ("remove", 7)]
    assert log == [(name, *event) for event in events for name in ("first", "second")]


def test_a_step_without_any_of_their_rows_asks_nobody(processors, log):
    processors.add(7, BIASED, [1], 1)
    log.clear()
    processors.apply(LOGITS[:1], np.array([2]))
    assert log == []


def test_masks_first_then_bias_then_penalties():
    """As vLLM V1 orders them: what a mask took away no bias brings back."""
    processors = make_logits_processors()
    processors.add(0, EVERYTHING, [0, 3], 1)
    logits = np.zeros((1, 6), dtype=np.float32)
    processors.apply(logits, np.array([0]))
    assert logits.tolist() == [[-np.inf, -np.inf, -np.inf, -1.0, -np.inf, -np.inf]]
    processors.append(np.array([0]), np.array([3]))
    logits = np.zeros((1, 6), dtype=np.float32)
    processors.apply(logits, np.array([0]))
    assert logits.tolist() == [[-np.inf, 100.0, -np.inf, -3.0, -np.inf, -np.inf]]
