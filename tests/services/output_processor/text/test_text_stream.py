"""Tests that streams make the text of decoding at once, for any tokens and wherever a character is cut."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tokenloom.services.output_processor.text.detokenizer import TableStream, WindowStream, open_text_stream
from tokenloom.services.output_processor.text.vocabulary import Vocabulary

LARGEST_ID = 400  # beyond every vocabulary of these tests: models are padded, tokenizers are not

token_ids = st.lists(st.integers(0, LARGEST_ID), max_size=24)
texts = st.text(st.sampled_from("the quickfox!. é日本語😀👩‍👧\u200d\n\t🇩🇪"), max_size=30)


def streamed(vocabulary: Vocabulary, prompt: list[int], output: list[int], skip: bool = True) -> str:
    stream = open_text_stream(vocabulary, prompt, skip)
    return "".join(map(stream.push, output)) + stream.finish()


def complete_text(tokenizer: Tokenizer, prompt: list[int]) -> str:
    """The prompt's text without a character that it begins and does not end."""
    texts = (tokenizer.decode(prompt[: len(prompt) - back]) for back in range(4))
    return max((text.rstrip("\ufffd") for text in texts), key=len)


def has_mixed_run(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether a run of byte tokens holds a malformed byte: there the tokenizer drops the run's good characters too."""
    tokens = [tokenizer.id_to_token(i) or "" for i in ids]
    run = b""
    for token in [*tokens, ""]:
        if re.fullmatch("<0x..>", token):
            run += bytes.fromhex(token[3:5])
        elif run:
            if "\ufffd" in run.decode(errors="replace"):
                return True
            run = b""
    return False


@given(prompt=token_ids, output=token_ids, skip=st.booleans())
def test_byte_level_random_ids_equal_decoding_in_one_piece(
    byte_level_tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    text = streamed(Vocabulary(byte_level_tokenizer), prompt, output, skip)
    whole = byte_level_tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert whole.endswith(text)
    if not byte_level_tokenizer.decode(prompt, skip_special_tokens=skip).endswith("\ufffd"):
        assert text == whole[len(byte_level_tokenizer.decode(prompt, skip_special_tokens=skip)) :]


@given(prompt=token_ids, output=token_ids, skip=st.booleans())
def test_random_ids_of_each_family_equal_decoding_in_one_piece(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool
) -> None:
    if has_mixed_run(tokenizer, prompt + output):
        return
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    text = streamed(Vocabulary(tokenizer), prompt, output, skip)
    assert whole.endswith(text)
    if not before.endswith("\ufffd"):
        assert text == whole[len(before) :]


@given(prompt=texts, output=texts, cut=st.integers(0, 100))
def test_encoded_text_cut_anywhere_comes_back(tokenizer: Tokenizer, prompt: str, output: str, cut: int) -> None:
    ids = tokenizer.encode(prompt + output, add_special_tokens=False).ids
    cut = min(cut, len(ids))
    text = streamed(Vocabulary(tokenizer), ids[:cut], ids[cut:])
    assert complete_text(tokenizer, ids[:cut]) + text == tokenizer.decode(ids)


@given(text=texts)
def test_no_delta_holds_half_a_character(byte_level_tokenizer: Tokenizer, text: str) -> None:
    stream = open_text_stream(Vocabulary(byte_level_tokenizer), [], True)
    deltas = [stream.push(i) for i in byte_level_tokenizer.encode(text).ids]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_of_four_tokens_comes_with_its_last_byte(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("𓀀").ids
    assert len(ids) == 4
    stream = open_text_stream(Vocabulary(byte_level_tokenizer), [], True)
    assert [stream.push(i) for i in ids] == ["", "", "", "𓀀"]


def test_a_character_that_is_never_completed_ends_as_one_replacement(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("𓀀").ids
    assert streamed(Vocabulary(byte_level_tokenizer), [], ids[:3]) == "\ufffd"


def test_the_output_completes_a_character_that_the_prompt_began(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("a𓀀b").ids
    assert streamed(Vocabulary(byte_level_tokenizer), ids[:3], ids[3:]) == "𓀀b"


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [
        ([], ["▁the", "▁the"], "the the"),
        (["<s>"], ["▁the", "▁the"], "the the"),  # a skipped token is no text to continue
        (["a"], ["▁the", "▁the"], " the the"),
        (["▁"], ["▁the"], " the"),  # the prompt's own space was the one to strip
        ([], ["▁", "▁the"], " the"),
        (["a"], ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"], "😀b"),
        (["a"], ["<0xC3>", "<0xA9>", "<0xFF>", "b"], "é\ufffdb"),  # what was sent is not taken back
        (["a"], ["<0xE2>", "<0x82>", "b"], "\ufffd\ufffdb"),
    ],
)
def test_sentencepiece_spaces_and_bytes(
    llama_tokenizer: Tokenizer, prompt: list[str], output: list[str], text: str
) -> None:
    ids = llama_tokenizer.token_to_id
    assert streamed(Vocabulary(llama_tokenizer), [ids(t) for t in prompt], [ids(t) for t in output]) == text


def test_added_tokens_are_text_unless_special_and_skipped(byte_level_tokenizer: Tokenizer) -> None:
    ids = [byte_level_tokenizer.token_to_id(t) for t in ("<tool_call>", "<|im_end|>", "t")]
    vocabulary = Vocabulary(byte_level_tokenizer)
    assert streamed(vocabulary, [], ids) == "<tool_call>t"
    assert streamed(vocabulary, [], ids, skip=False) == "<tool_call><|im_end|>t"


def test_only_decoders_that_look_around_need_windows(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    stream = open_text_stream(Vocabulary(tokenizer), [], True)
    assert isinstance(stream, WindowStream if "word_piece" in request.node.name else TableStream)
