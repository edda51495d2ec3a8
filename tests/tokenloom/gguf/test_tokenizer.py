"""Tokenizers from the metadata of GGUF files."""

import math
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer

from tests.tokenloom.gguf.demo_file import Change, add_tokenizer
from tests.tokenloom.gguf.demo_file import write_metadata as write
from tokenloom.gguf.tokenizer import SPLITTINGS, make_pre_tokenizer
from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_file, tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import InvalidArgument, NotFound

TEXTS = [
    "Once upon a time, in 1984, there were 23 dragons.\n\nThey didn't sleep — naïve 東京 ½ 🐉!",
    "<|im_start|>user\nHi<tool_call>{}</tool_call><|im_end|>",
    "",
    " leading  and   many spaces\t\r\nend ",
]


def test_a_byte_level_tokenizer_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    found, expected = load_tokenizer(write(tmp_path / "demo.gguf", add_tokenizer)), load_tokenizer(DEMO_MODEL)
    assert found.get_vocab() == expected.get_vocab()
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == text
        assert found.decode(ids) == expected.decode(ids)


def test_template_ends_and_special_tokens(tmp_path: Path) -> None:
    info, expected = CheckpointInfo.load(write(tmp_path / "demo.gguf", add_tokenizer)), CheckpointInfo.load(DEMO_MODEL)
    assert info.chat_template == expected.chat_template != ""
    assert info.eos_token_ids == expected.eos_token_ids
    assert info.special_tokens == expected.special_tokens
    without = write(tmp_path / "plain.gguf", lambda writer: add_tokenizer(writer, template=False))
    assert CheckpointInfo.load(without).chat_template == ""


def test_tokens_that_begin_and_end_a_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "demo.gguf",
        add_tokenizer,
        lambda writer: writer.add_bos_token_id(1),
        lambda writer: writer.add_add_bos_token(True),
        lambda writer: writer.add_add_eos_token(True),
    )
    tokenizer = load_tokenizer(path)
    ids = load_tokenizer(DEMO_MODEL).encode("Hello").ids
    assert tokenizer.encode("Hello").ids == [1, *ids, 2]
    assert tokenizer.encode("Hello", add_special_tokens=False).ids == ids


def test_the_fingerprint_follows_the_tokenizer(tmp_path: Path) -> None:
    first, same, other = (
        tokenizer_fingerprint(write(tmp_path / name, add_tokenizer, *more))
        for name, more in {
            "a.gguf": (),
            "b.gguf": (lambda writer: writer.add_name("other weights"),),
            "c.gguf": (lambda writer: writer.add_add_bos_token(False),),
        }.items()
    )
    assert first == same != other


def test_a_copy_for_parts_that_read_only_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = write(tmp_path / "demo.gguf", add_tokenizer)
    copy = tokenizer_file(path)
    assert copy is not None
    assert copy.is_relative_to(tmp_path / "home")
    assert tokenizer_file(path) == copy
    assert Tokenizer.from_file(str(copy)).encode(TEXTS[0]).ids == load_tokenizer(path).encode(TEXTS[0]).ids
    (tmp_path / "home-file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home-file"))
    assert tokenizer_file(path) is None


WORDS = {
    "gpt-2": ["I", "'ve", " 123", " cats", "'", "S", "  ", " x"],
    "llama-bpe": ["I", "'ve", " ", "123", " cats", "'S", "  ", " x"],
    "qwen2": ["I", "'ve", " ", "1", "2", "3", " cats", "'S", "  ", " x"],
    "smollm": ["I", "'ve", " ", "1", "2", "3", " cats", "'", "S", "  ", " x"],
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    found = make_pre_tokenizer(SPLITTINGS[name]).pre_tokenize_str("I've 123 cats'S   x")
    assert [word.replace("\u0120", " ") for word, _ in found] == WORDS[name]


BY_CASE = {
    "gpt-4o": "Hello|World| it's| |123|4|,| IT'S| 東京タワー| カタ漢字abc|//\n\n|!",
    "tekken": "Hello|World| it|'s| |1|2|3|4|,| IT|'S| 東京タワー| カタ漢字abc|//\n\n|!",
    "kimi-k2": "Hello|World| it's| |123|4|,| IT'S| |東京|タワー| カタ|漢字|abc|//\n\n|!",
    "dbrx": "HelloWorld| it|'s| |123|4|,| IT|'S| 東京タワー| カタ漢字abc|//\n\n|!",
    "deepseek-v3": "HelloWorld| it|'s| |123|4|,| IT|'S| |東京タワー| |カタ漢字|abc|//\n\n|!",
    "deepseek-llm": "HelloWorld| it|'|s| |1|2|3|4|,| IT|'|S| |東京タワー| |カタ漢字|abc|//|\n|\n|!",
    "deepseek-coder": "HelloWorld| it|'|s| |1|2|3|4|,| IT|'|S| |東京タワー| |カタ漢字|abc|//|\n|\n|!",
}


@pytest.mark.parametrize("name", BY_CASE)
def test_words_of_newer_models(name: str) -> None:
    """The expressions stand in src/llama-vocab.cpp as those of each ``tokenizer.json``; the text is cut by hand."""
    text = "HelloWorld it's 1234, IT'S 東京タワー カタ漢字abc//\n\n!"
    found = make_pre_tokenizer(SPLITTINGS[name]).pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == BY_CASE[name].split("|")


def test_letters_of_the_first_deepseek() -> None:
    """Letters without cases, and those that its list lacks, are no words."""
    splitter = make_pre_tokenizer(SPLITTINGS["deepseek-llm"])
    text = "ДаΩß\U0001d400ǅՖՠ"
    found = [text[begin:end] for _, (begin, end) in splitter.pre_tokenize_str(text)]
    assert found == ["ДаΩß", "\U0001d400", "ǅՖ", "ՠ"]


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
JOINED = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "bc"]
"""Higher scores first: "ab" is joined before "\u2581a"."""


def add_sentence_piece(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES + JOINED)
    writer.add_token_scores([0.0] * len(PIECES) + [-float(i) for i in range(len(JOINED))])
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * len(JOINED))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_a_file_that_names_no_splitting_is_split_as_llama_cpp_does() -> None:
    """The expressions are those of the default case of src/llama-vocab.cpp; words of this text, cut by hand."""
    splitter = make_pre_tokenizer(SPLITTINGS["default"])
    found = [word.replace("Ġ", " ") for word, _ in splitter.pre_tokenize_str("Well, it's 1234567 or x+=2  (no)!")]
    expected = "Well|,| it|'|s| |123|456|7| or| x|+=|2|  |(|no|)!"
    assert found == expected.split("|")


def test_merges_of_characters(tmp_path: Path) -> None:
    """The kind of tokenizer in files of Gemma 4 (``Gemma4Model.set_vocab`` of conversion/gemma.py in llama.cpp)."""

    def add(writer: gguf.GGUFWriter) -> None:
        joined = ["\u2581", "a", "b", "c", "\n", "ab", "\u2581a", "\u2581ab", "\n\n"]
        pieces = ["<unk>", "<bos>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(pieces + joined)
        kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
        writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * len(joined))
        writer.add_token_merges(["a b", "\u2581 a", "\u2581 ab", "\n \n"])
        writer.add_bos_token_id(1)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(True)

    path = write(tmp_path / "model.gguf", add)
    tokenizer = load_tokenizer(path)
    cases = {
        "ab ab": ["<bos>", "ab", "\u2581ab"],
        "a\n\n c": ["<bos>", "a", "\n\n", "\u2581", "c"],
        "é<turn|>": ["<bos>", "<0xC3>", "<0xA9>", "<turn|>"],
    }
    for text, expected in cases.items():
        encoding = tokenizer.encode(text)
        assert encoding.tokens == expected
        assert tokenizer.decode(encoding.ids) == text.removesuffix("<turn|>")
    assert CheckpointInfo.load(path).eos_token_ids == (2,)


def test_ends_of_gpt_oss(tmp_path: Path) -> None:
    """Those of its generation_config.json; ``<|end|>`` ends a message of an answer that has several."""

    def add(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] + [gguf.TokenType.CONTROL] * (len(tokens) - 1))
        writer.add_token_merges(["a a"])
        writer.add_eos_token_id(2)

    tokens = ["a", "<|endoftext|>", "<|return|>", "<|channel|>", "<|end|>", "<|call|>"]
    path = write(tmp_path / "oss.gguf", lambda writer: add(writer, tokens))
    assert CheckpointInfo.load(path).eos_token_ids == (1, 2, 5)
    path = write(tmp_path / "phi.gguf", lambda writer: add(writer, tokens[:-1]))
    assert CheckpointInfo.load(path).eos_token_ids == (1, 2, 4)


def test_sentence_piece(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", add_sentence_piece)
    tokenizer = load_tokenizer(path)
    cases = {
        "ab": ["<s>", "\u2581ab"],
        "abc ab": ["<s>", "\u2581ab", "c", "\u2581ab"],
        "é": ["<s>", "\u2581", "<0xC3>", "<0xA9>"],
        "b</s>": ["<s>", "\u2581", "b", "</s>"],
    }
    for text, expected in cases.items():
        encoding = tokenizer.encode(text)
        assert encoding.tokens == expected
        assert tokenizer.decode(encoding.ids) == text.removesuffix("</s>")
    assert CheckpointInfo.load(path).eos_token_ids == (2,)
    bare = load_tokenizer(
        write(tmp_path / "bare.gguf", add_sentence_piece, lambda writer: writer.add_add_space_prefix(False))
    )
    assert bare.encode("ab c", add_special_tokens=False).tokens == ["ab", "\u2581", "c"]


REFUSED: dict[str, tuple[Change, str]] = {
    "no tokenizer": (
        lambda writer: None,
        r"tokenizer\.ggml\.model None is not supported: must be gpt2, ",
    ),
    "another kind": (lambda writer: writer.add_tokenizer_model("t5"), "'t5' is not supported"),
    "no tokens": (
        lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("gpt-2")),
        r"tokenizer\.ggml\.tokens must be a list of str",
    ),
    "another way to split": (
        lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("viking")),
        r"tokenizer\.ggml\.pre 'viking' is not supported: must be one of default",
    ),
    "an end that is no token": (
        lambda writer: (add_tokenizer(writer), writer.add_bos_token_id(99_999), writer.add_add_bos_token(True)),
        r"tokenizer\.ggml\.bos_token_id must be one of 2048 tokens, found 99999",
    ),
    "scores that lack tokens": (
        lambda writer: (
            writer.add_tokenizer_model("llama"),
            writer.add_token_list(["a", "b"]),
            writer.add_token_scores([math.pi]),
        ),
        r"tokenizer\.ggml\.scores has 1 entries for 2 tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(InvalidArgument, match=rf"model\.gguf: .*{message}"):
        load_tokenizer(write(tmp_path / "model.gguf", change))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"'no\.gguf' cannot be read"):
        load_tokenizer(tmp_path / "no.gguf")
