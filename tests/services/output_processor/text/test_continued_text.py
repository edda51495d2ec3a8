"""Tests text that is made in several calls: it is that of one call, wherever the tokens are divided."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.output_processor.text.continued_text import MAX_TOKENS, detokenize
from tokenloom.services.output_processor.text.detokenizer import Detokenizer
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.output_processor_pb2 import DetokenizeRequest, TextOptions


def whole(
    vocabulary: Vocabulary, prompt: list[int], ids: list[int], stop: list[str], min_tokens: int = 0
) -> tuple[str, str | None]:
    """Return the text as a generation makes it, and the stop string that ended it."""
    detokenizer = Detokenizer(vocabulary, prompt, stop=stop, min_tokens=min_tokens)
    text, match = detokenizer.step(ids)
    return text + detokenizer.finish(), None if match is None else match.stop_string


async def in_calls(
    vocabulary: Vocabulary, prompt: list[int], ids: list[int], sizes: list[int], stop: list[str], min_tokens: int = 0
) -> tuple[str, str | None]:
    """Return the same of calls, each of which knows only what the one before has answered."""
    text, held, context, rest = "", "", prompt, ids
    for size in [*sizes, len(ids) + 1]:
        ends = size >= len(rest)
        request = DetokenizeRequest(
            context_ids=context,
            token_ids=rest[:size],
            text=TextOptions(stop=stop),
            held_text=held,
            ends=ends,
            min_tokens=max(min_tokens - len(ids) + len(rest), 0),
        )
        response = await detokenize(vocabulary, request)
        text, rest = text + response.text, rest[size:]
        held, context = response.held_text, list(response.context_ids)
        assert len(context) <= 16
        if response.HasField("stop_string"):
            return text, response.stop_string
        if ends:
            break
    return text, None


_IDS = st.lists(st.integers(0, 400), max_size=24)  # beyond every vocabulary of these tests
_STOPS = st.lists(st.text("the ofx\ufffd", min_size=1, max_size=3), max_size=2)
_SIZES = st.lists(st.integers(1, 4), max_size=30)


@given(prompt=_IDS, ids=_IDS, sizes=_SIZES, stop=_STOPS)
@example(prompt=[126], ids=[], sizes=[], stop=["\ufffd"])  # the end completes the prompt's last character
def test_how_tokens_are_grouped_into_calls_changes_nothing(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], sizes: list[int], stop: list[str]
) -> None:
    vocabulary = Vocabulary(tokenizer)
    assert asyncio.run(in_calls(vocabulary, prompt, ids, sizes, stop)) == whole(vocabulary, prompt, ids, stop)


@given(ids=_IDS, sizes=_SIZES, stop=_STOPS, min_tokens=st.integers(0, 12))
@example(ids=[195], sizes=[], stop=["\ufffd"], min_tokens=0)  # the end completes it, which is no reason for the end
def test_early_tokens_complete_no_stop_string(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], stop: list[str], min_tokens: int
) -> None:
    vocabulary = Vocabulary(tokenizer)
    found = asyncio.run(in_calls(vocabulary, [], ids, sizes, stop, min_tokens))
    assert found == whole(vocabulary, [], ids, stop, min_tokens)


@pytest.mark.parametrize(
    ("before", "after"), [("é"[:1], "x"), ("a ", "b")], ids=["a character before them is complete", "a text has begun"]
)
@pytest.mark.parametrize("num_blank", [40, 600])
async def test_many_tokens_without_text_change_nothing(
    tokenizer: Tokenizer, before: str, after: str, num_blank: int
) -> None:
    vocabulary = Vocabulary(tokenizer)
    blank = 10**6
    head, tail = (tokenizer.encode(text, add_special_tokens=False).ids for text in (before, after))
    ids = [*head, *[blank] * num_blank, *tail, *tail]
    sizes = [1] * len(head) + [num_blank, 1, 1]
    assert await in_calls(vocabulary, [], ids, sizes, []) == whole(vocabulary, [], ids, [])
    prompt = ids[: -2 * len(tail)]
    assert await in_calls(vocabulary, prompt, tail, [1], []) == whole(vocabulary, prompt, tail, [])


async def test_the_bytes_of_single_tokens(byte_level_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    ids = [1, 5, 300, 10**6]
    response = await detokenize(vocabulary, DetokenizeRequest(single_ids=ids))
    assert list(response.single_bytes) == [vocabulary.token_bytes(each) for each in ids]


async def test_limits_of_a_call(byte_level_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_level_tokenizer)
    with pytest.raises(InvalidArgument, match="4096 tokens"):
        await detokenize(vocabulary, DetokenizeRequest(token_ids=[1] * (MAX_TOKENS + 1)))
    with pytest.raises(InvalidArgument, match="empty string"):
        await detokenize(vocabulary, DetokenizeRequest(token_ids=[1], text=TextOptions(stop=[""])))
