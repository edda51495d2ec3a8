import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.output_constraints import forbid_words, word_spellings
from tokenloom.v1.types_pb2 import SamplingParams


def test_a_word_is_spelled_with_and_without_a_space() -> None:
    assert word_spellings(["no", "  never ever"]) == ["no", " no", "never ever", " never ever"]


@pytest.mark.parametrize("words", [[""], ["  "], ["ok", "a" * 1025], ["a"] * 513, ["a\ud83d"]])
def test_words_that_are_none(words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        word_spellings(words)
    assert caught.value.field == "bad_words"


@pytest.mark.parametrize(
    ("plain", "spaced", "forbidden"),
    [
        ([5], [6], [[5], [6]]),
        ([5, 7], [6], [[5, 7], [6]]),
        ([5], [9, 5], [[5]]),  # whatever ends with the word is forbidden by it
        ([5], [5], [[5]]),
    ],
)
def test_what_is_forbidden(plain: list[int], spaced: list[int], forbidden: list[list[int]]) -> None:
    params = SamplingParams()
    forbid_words(params, [plain, spaced])
    assert [list(word.ids) for word in params.bad_words] == forbidden
