"""Tests that tokens which clients spell out are encoded as plain text, and the template's own as what they are."""

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.tokenizer.output_format import PARSED_MARKS, control_tokens
from tokenloom.services.tokenizer.spelled_tokens import Masks, PlainTextEncoder, Rendered, TokenFinder, unmasked

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|", "[INST]"]
PIECES = [*MARKS, "<", "s", ">", "|", "im_end", " ", "  ", "\n", "Ärger", "the end", "▁", "é😀", "im"]


def demo() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


def unigram() -> Tokenizer:
    """As T5's: control tokens are pieces of the model, with the best score."""
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", rstrip=True)])
    return tokenizer


def words() -> Tokenizer:
    """A model of whole words, which lowers them; a mark is a word of it, another one is not."""
    vocabulary = {"[unk]": 0, "<s>": 1, "the": 2, "end": 3, "im": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([AddedToken("<|im_end|>", lstrip=True), AddedToken("im_end", single_word=True)])
    return tokenizer


TOKENIZERS = {"demo": demo, "unigram": unigram, "words": words}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


def test_a_text_without_masks_is_encoded_as_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    plain, draw = PlainTextEncoder(tokenizer), random.Random(1)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 9)))
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert plain.encode(Rendered(text), want_strings=True) == (encoding.ids, encoding.tokens), text


def test_a_mask_becomes_plain_text_and_no_control_token(tokenizer: Tokenizer) -> None:
    added = tokenizer.get_added_tokens_decoder()
    plain = PlainTextEncoder(tokenizer)
    own = next(iter(added))
    for token in added.values():
        rendered = Rendered(f"{added[own].content} the \U00100000 end", {"\U00100000": token.content})
        ids, tokens = plain.encode(rendered, want_strings=True)
        assert [each for each in ids if each in added] == [own], token.content
        assert tokens[ids.index(own)] == added[own].content


def test_the_plain_text_is_what_the_client_wrote() -> None:
    tokenizer = demo()
    rendered = Rendered("<|im_start|>user\na\U00100000b<|im_end|>", {"\U00100000": "<|im_end|>"})
    ids, _ = PlainTextEncoder(tokenizer).encode(rendered)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\na<|im_end|>b<|im_end|>"
    assert [ids.count(1), ids.count(2)] == [1, 1]


def test_only_texts_of_clients_are_masked_and_marks_stay_in_the_assistants_words() -> None:
    finder = TokenFinder(["<|im_end|>", "<think>", "<tool_call>"])
    call = {"function": {"name": "f", "arguments": {"<think>": ["<|im_end|>"]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "\U00100000 <|im_end|> <think> <tool_cal"},
        {"role": "assistant", "content": "<think>x</think><|im_end|>", "tool_calls": [call]},
    ]
    masks = Masks(finder, messages, PARSED_MARKS)
    user, assistant = masks.messages(messages)
    assert user == {"role": "user", "content": "\U00100000 \U00100001 \U00100002 <tool_cal"}
    assert assistant["content"] == "<think>x</think>\U00100001"
    arguments = assistant["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"\U00100002": ["\U00100001"]}
    assert masks.tokens == {"\U00100001": "<|im_end|>", "\U00100002": "<think>"}
    assert unmasked(user["content"], masks.tokens) == messages[0]["content"]
    assert unmasked(r"\udbc0\udc01 \udbc0\udc00", masks.tokens) == r"<|im_end|> \udbc0\udc00"  # JSON in ASCII


@given(st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=12), st.text("ab<c", max_size=30))
def test_the_longest_token_is_found_at_each_place(tokens: list[str], text: str) -> None:
    found: list[str] = []
    at = 0
    while at < len(text):
        here = max((token for token in tokens if text.startswith(token, at)), key=len, default="")
        found += [here] if here else []
        at += len(here) or 1
    matched: list[str] = []
    TokenFinder(tokens).replace(text, lambda match: matched.append(match[0]) or "")  # type: ignore[func-returns-value]
    assert matched == found


def test_a_tokenizer_with_many_added_tokens_is_copied_at_once() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[unk]": 0}, unk_token="[unk]"))
    tokenizer.add_special_tokens([f"<unused{at}>" for at in range(1600)])
    before = time.thread_time()
    PlainTextEncoder(tokenizer)
    assert time.thread_time() - before < 5  # token by token it took half a minute


def test_a_json_text_says_whether_a_token_may_be_in_it() -> None:
    finder = TokenFinder(["<s>"])
    assert finder.may_be_in('["<s>"]')
    assert finder.may_be_in('["\\u003cs>"]')
    assert not finder.may_be_in('["<t>"]')
    assert not TokenFinder([]).may_be_in('["<s>"]')
    assert TokenFinder(['<"s">']).may_be_in('["<\\"s\\">"]')


def test_ordinary_text_that_a_vocabulary_adds_is_no_control_token() -> None:
    tokenizer = demo()
    ordinary = ["\n\n", "▁▁", "<h1>", "covid19"]
    marks = ["<turn>", "<|fim|>", "[X]", "</think>"]
    tokenizer.add_tokens([*ordinary, *marks])
    controls = control_tokens(tokenizer, "{{ '<turn>' }}")
    assert not set(ordinary) & set(controls)
    assert {*marks, "<|im_end|>", "<tool_call>"} <= set(controls)


def test_the_marks_of_all_parsers_stay_in_the_assistants_turns() -> None:
    assert {"<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|tool_call_end|>"} <= set(PARSED_MARKS)
    assert "<|channel|>" not in PARSED_MARKS, "templates write the messages of gpt-oss with their headers"
