import pytest

from tokenloom.bad_words import encode_bad_words

TOKENS = {
    "a": [1],
    " a": [11],
    "ab": [1, 2],
    " ab": [11, 2],
    "c": [3],
    " c": [4, 3],
    "d": [5],
    " d": [5],
    "e": [6, 7],
    " e": [8],
}


def test_with_and_without_a_space_before():
    assert encode_bad_words(["a", " ab", "e"], TOKENS.__getitem__) == [[1], [11], [1, 2], [11, 2], [6, 7], [8]]


def test_a_space_of_its_own_or_none_is_no_other_word():
    assert encode_bad_words(["c", "d"], TOKENS.__getitem__) == [[3], [5]]


def test_a_word_without_tokens_is_named():
    with pytest.raises(ValueError, match="bad_words holds ' '"):
        encode_bad_words([" "], {"": [], " ": []}.__getitem__)
