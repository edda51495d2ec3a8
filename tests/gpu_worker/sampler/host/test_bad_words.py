"""Bad words against the plain reading: what would complete a word, looking at the whole output."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.sampler.host.processing import OneRow

VOCAB = 4
TOKENS = st.integers(0, VOCAB - 1)


def reference(words, output):
    """As vLLM reads them."""
    return {word[-1] for word in words if len(word) == 1 or output[-(len(word) - 1) :] == list(word[:-1])}


def test_a_word_of_one_token_is_always_masked():
    assert OneRow(bad_words=((2,), (2,), (0,))).masked(VOCAB) == {0, 2}


def test_the_last_token_is_masked_when_all_before_it_stand_in_the_output():
    row = OneRow(prompt=[0, 1], bad_words=((0, 1, 2),))
    assert row.masked(VOCAB) == set()
    row.append(0)
    row.append(1)
    assert row.masked(VOCAB) == {2}
    row.append(3)
    assert row.masked(VOCAB) == set()


@pytest.mark.parametrize("num_accepted", [0, 1, 5])
def test_every_way_into_a_word_is_closed(num_accepted):
    words = ((1, 1), (0, 1, 0), (2,))
    output = [1, 0, 1, 3, 1, 0, 0]
    row = OneRow(output=output[:num_accepted], bad_words=words)
    for token in output[num_accepted:]:
        row.append(token)
    assert row.masked(VOCAB) == reference(words, output)


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
        assert row.masked(VOCAB) == reference(words, output[:length])
        if length < len(output):
            row.append(output[length])
