"""Lists how byte-level vocabularies split a text before merging, by ``tokenizer.ggml.pre``.

A name stands for the regular expressions of one model's tokenizer, which the file itself does not hold.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True, slots=True)
class Splitting:
    """Describes how a text is cut into words, within which tokens are merged."""

    patterns: tuple[str, ...]
    """Every match of a pattern, and every text between two, is a word; the next pattern cuts these words again."""
    composes: bool = False
    """Whether characters are composed first (NFC)."""
    whole_words_first: bool = False
    """Whether a word that is a token is not built by merges."""
    begins: bool = False
    """Whether a text begins with the begin-of-sequence token, if the file does not say."""


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _modern(digits: str) -> str:
    """Return the pattern of Llama 3 and its successors, which take numbers as ``digits``."""
    words = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    return rf"{words}|\s*[\r\n]+|{_SPACES}"


_GPT2_LIKE = Splitting((_GPT2,))
_DIGITS_FIRST = Splitting((r"\p{N}", _GPT2))
_QWEN = Splitting((_modern(r"\p{N}"),), composes=True)
_LLAMA3 = Splitting((_modern(r"\p{N}{1,3}"),), whole_words_first=True, begins=True)

SPLITTINGS: dict[str, Splitting] = {
    "gpt-2": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "phi-2": _GPT2_LIKE,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "command-r": _DIGITS_FIRST,
    "exaone": _DIGITS_FIRST,
    "refact": _DIGITS_FIRST,
    "smollm": _DIGITS_FIRST,
    "starcoder": _DIGITS_FIRST,
}


def make_pre_tokenizer(splitting: Splitting) -> "PreTokenizer":
    """Return the first steps of encoding: words, then the characters that stand for their bytes."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    words = [Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    return Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=False)])
