"""Tests that a panic of the library becomes an error of the call and does not end the process."""

from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tokenloom.model_files.sentence_texts import SentenceTexts
from tokenloom.request import errors
from tokenloom.services.tokenizer.encoder import PromptTruncation, TextEncoder
from tokenloom.services.tokenizer.spelled_tokens import Rendered
from tokenloom.v1.tokenizer_pb2 import EncodeChatRequest, EncodeRequest, TokenizedPrompt


class Panic(BaseException):
    """As the library's PanicException: not an Exception."""


class Panicking:
    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> NoReturn:
        raise Panic("byte index 1 is not a char boundary")


def make(tokenizer: Any) -> TextEncoder:
    return TextEncoder(tokenizer, block_size=16, max_text_bytes=100)


def encode(encoder: TextEncoder, texts: list[str], **fields: Any) -> Sequence[TokenizedPrompt]:
    return encoder.encode(EncodeRequest(texts=texts, **fields)).prompts


def test_a_panic_is_an_invalid_argument() -> None:
    encoder = make(Panicking())
    with pytest.raises(errors.InvalidArgument, match="fails on this text"):
        encode(encoder, ["x"], add_special_tokens=False)


def test_tokens_under_masks_count_with_their_length() -> None:
    encoder = make(_word_piece())
    rendered = Rendered("\U00100000" * 9, {"\U00100000": "<|im_start|>"})
    with pytest.raises(errors.InvalidArgument, match="at most 100 bytes"):
        encoder.encode_chat(rendered, EncodeChatRequest())


def _word_piece() -> Tokenizer:
    """BERT-like: one token for each letter, special tokens around and between texts."""
    vocab = {token: index for index, token in enumerate(["[CLS]", "[SEP]", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    return tokenizer


def test_pairs_are_joined_as_the_tokenizer_joins_them() -> None:
    encoder = make(_word_piece())
    (pair,) = encode(encoder, ["a b"], add_special_tokens=True, second_texts=["c"])
    assert (list(pair.token_ids), pair.first_part_tokens) == ([0, 2, 3, 1, 4, 1], 4)
    with pytest.raises(errors.InvalidArgument, match="second_texts"):
        encode(encoder, ["a"], add_special_tokens=True, second_texts=["b", "c"])


@pytest.mark.parametrize(
    ("second", "cut", "ids"),
    [
        (None, PromptTruncation(4), [0, 4, 5, 1]),
        (None, PromptTruncation(4, keep_first=True), [0, 2, 3, 1]),
        (None, PromptTruncation(6), [0, 2, 3, 4, 5, 1]),
        ("e f g", PromptTruncation(8), [0, 2, 3, 4, 5, 1, 8, 1]),
        ("e f g", PromptTruncation(8, keep_first=True), [0, 2, 3, 4, 5, 1, 6, 1]),
        ("e f g", PromptTruncation(5), [0, 4, 5, 1, 1]),
    ],
)
def test_a_cut_keeps_special_tokens_and_the_first_text(
    second: str | None, cut: PromptTruncation, ids: list[int]
) -> None:
    encoder = make(_word_piece())
    seconds = [] if second is None else [second]
    (prompt,) = encode(
        encoder,
        ["a b c d"],
        add_special_tokens=True,
        second_texts=seconds,
        max_tokens=cut.max_tokens,
        keep_first=cut.keep_first,
    )
    assert list(prompt.token_ids) == ids


PROMPTS = SentenceTexts({"query": "find: ", "document": ""}, "query", max_tokens=5, pools_prompt=False)


def with_prompts(texts: SentenceTexts | None = PROMPTS) -> TextEncoder:
    """Return an encoder whose tokens are words, between [CLS] and [SEP]."""
    vocabulary = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "find", ":", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return TextEncoder(tokenizer, block_size=16, max_text_bytes=100, vector_texts=texts)


@pytest.mark.parametrize(
    ("name", "options", "ids", "skipped"),
    [
        (None, {}, [1, 5, 6, 7, 2], 0),
        ("", {}, [1, 3, 4, 5, 2], 3),
        ("query", {}, [1, 3, 4, 5, 2], 3),
        ("document", {}, [1, 5, 6, 7, 2], 0),
        ("query", {"max_tokens": 4}, [1, 6, 7, 2], 1),
        ("query", {"max_tokens": 4, "keep_first": True}, [1, 3, 4, 2], 3),
        ("query", {"max_tokens": 6}, [1, 3, 4, 5, 2], 3),
        ("query", {"add_special_tokens": False}, [3, 4, 5, 6, 7], 3),
    ],
)
def test_prompts_before_texts_that_become_vectors(
    name: str | None, options: dict[str, Any], ids: list[int], skipped: int
) -> None:
    encoder = with_prompts()
    asked = {"add_special_tokens": True, "prompt_name": name} | options
    (prompt,) = encode(encoder, ["a b c"], **asked)
    assert (list(prompt.token_ids), prompt.skipped_tokens) == (ids, skipped)


@pytest.mark.parametrize(
    ("texts", "name", "message"),
    [(PROMPTS, "passage", "prompts are: document, query"), (None, "query", "files define no prompts")],
)
def test_unknown_prompts_are_refused(texts: SentenceTexts | None, name: str, message: str) -> None:
    encoder = with_prompts(texts)
    with pytest.raises(errors.InvalidArgument, match=message) as caught:
        encode(encoder, ["a"], add_special_tokens=True, prompt_name=name)
    assert caught.value.field == "prompt_name"


def test_a_prompt_without_tokens_changes_nothing() -> None:
    encoder = with_prompts(SentenceTexts({"query": "  "}, pools_prompt=False, adds_special_tokens=False))
    (prompt,) = encode(encoder, ["a b"], add_special_tokens=True, prompt_name="query")
    assert (list(prompt.token_ids), prompt.skipped_tokens) == ([5, 6], 0)


def test_no_files_change_nothing() -> None:
    encoder = with_prompts(None)
    (prompt,) = encode(encoder, ["a b"], add_special_tokens=True, prompt_name="")
    assert (list(prompt.token_ids), prompt.skipped_tokens) == ([1, 5, 6, 2], 0)
