"""Builds a tokenizer from the metadata of a GGUF file, and reads the chat template and the tokens that end an answer.

Three kinds of vocabularies are read: byte-level BPE with merges ("gpt2"), SentencePiece's BPE with scores ("llama"),
and BPE with merges of characters ("gemma4"). How a byte-level vocabulary splits a text before merging is named by
``tokenizer.ggml.pre``: a name stands for the regular expressions of one model's tokenizer, which the file itself does
not hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
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


def _modern(digits: str, letters: str = r"\p{L}") -> str:
    """Return the pattern of Llama 3 and its successors, which take numbers as ``digits``, and words of ``letters``."""
    words = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return rf"{words}|\s*[\r\n]+|{_SPACES}"


_MARKS = r" ?[^\s\p{L}\p{N}]+"


def _by_case(contractions: str, digits: str, *, slash: str = "/", without: str = "") -> str:
    """Return the pattern of GPT-4o and its successors, by which a word ends where capitals begin.

    ``slash`` may end marks beside new lines; ``without`` restricts the classes of letters.
    """
    start, end = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{start}*{end}+{contractions}|{before}{start}+{end}*{contractions}"
    return rf"{words}|{digits}|{_MARKS}[\r\n{slash}]*|\s*[\r\n]+|{_SPACES}"


_GPT2_LIKE = Splitting((_GPT2,))
# What llama.cpp does for files that name no model: those of before April 2024, and those of converters that knew none.
_DEFAULT = Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9]{3}"))
_DIGITS_FIRST = Splitting((r"\p{N}", _GPT2))
_QWEN = Splitting((_modern(r"\p{N}"),), composes=True)
_QWEN35 = Splitting((_modern(r"\p{N}", r"\p{L}\p{M}"),), composes=True)
_CL100K = Splitting((_modern(r"\p{N}{1,3}"),))
_LLAMA3 = replace(_CL100K, whole_words_first=True, begins=True)
_ANY_CASE = rf"(?i:{_CONTRACTIONS})?"
_GPT4O = Splitting((_by_case(_ANY_CASE, r"\p{N}{1,3}"),))
_TEKKEN = Splitting((_by_case("", r"\p{N}"),), whole_words_first=True, begins=True)
_HAN = r"\p{Han}+|" + _by_case(_ANY_CASE, r"\p{N}{1,3}", slash="", without=r"&&[^\p{Han}]")
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NEWER = r"\u0560-\u0588\u10C6-\u10FF\u1C80-\u1C8F\u2D00-\u2D2F\uA790-\uA7FF\uAB30-\uAB6F\x{10570}-\x{105BF}"
_NEWEST = r"\x{10D50}-\x{10D8F}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}\x{1DF00}-\x{1DFFF}"
"""Letters that have cases and are not in the list of letters of DeepSeek's first tokenizer, which it is equal to
otherwise."""
_DEEPSEEK_LLM = Splitting(
    (
        r"[\r\n]",
        rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_NEWER}{_NEWEST}]]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}",
    )
)
_DEEPSEEK_CODER = Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))
_DEEPSEEK3 = Splitting(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
    )
)

_NAMES = {
    _DEFAULT: "default",
    _GPT2_LIKE: "gpt-2 mpt olmo phi-2 jais exaone4 trillion granite-docling",
    _LLAMA3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2",  # Falcon's own also cut at marks; this is llama.cpp's
    _QWEN: "qwen2 deepseek-r1-qwen",
    _QWEN35: "qwen35",
    _DIGITS_FIRST: "command-r exaone refact smollm starcoder codeshell minerva-7b",
    _CL100K: "dbrx smaug-bpe glm4 chatglm-bpe",
    _GPT4O: "gpt-4o llama4",
    _TEKKEN: "tekken pixtral",
    Splitting((_HAN,)): "kimi-k2",
    _DEEPSEEK_LLM: "deepseek-llm",
    _DEEPSEEK_CODER: "deepseek-coder",
    _DEEPSEEK3: "deepseek-v3",
}
SPLITTINGS = {name: splitting for splitting, names in _NAMES.items() for name in names.split()}
"""How a text is split, by the names of ``tokenizer.ggml.pre``."""


def make_pre_tokenizer(splitting: Splitting) -> "PreTokenizer":
    """Return the first steps of encoding: words, then the characters that stand for their bytes."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    words = [Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    return Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=False)])


_PREFIX = "tokenizer.ggml."

_END_OF_MESSAGE, _ENDS_OF_HARMONY = "<|end|>", ("<|return|>", "<|call|>")
_END_TEXTS = frozenset(
    (
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"),
        *("<turn|>", "<|tool_response>"),
        *(_END_OF_MESSAGE, *_ENDS_OF_HARMONY),
    )
)
"""Control tokens that end an answer, whichever of them the file names as its one end-of-sequence token."""

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class TokenType(IntEnum):
    """Lists the kinds of tokens in ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def check_tokenizer(file: GgufFile) -> None:
    """Raise ``ValueError`` naming a kind of tokenizer, or a way to split texts, that is not supported."""
    kind = file.metadata.get(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"{file.path.name}: {_PREFIX}model {kind!r} is not supported: must be gpt2, llama or gemma4")
    if kind == "gpt2":
        _splitting(file)


def make_tokenizer(file: GgufFile) -> "Tokenizer":
    """Return the file's tokenizer. Raises ``ValueError`` naming what the file lacks or what is not supported."""
    check_tokenizer(file)
    if file.metadata[f"{_PREFIX}model"] == "gpt2":
        splitting = _splitting(file)
        tokenizer, begins = _byte_level(file, splitting), splitting.begins
    elif file.metadata[f"{_PREFIX}model"] == "gemma4":
        tokenizer, begins = _spaced(file), True
    else:
        tokenizer, begins = _sentence_piece(file), True
    tokens = _list(file, "tokens", str)
    add_special_tokens(tokenizer, tokens, _token_types(file, len(tokens)))
    _add_ends(tokenizer, file, begins_by_default=begins)
    return tokenizer


def special_tokens(file: GgufFile) -> dict[str, str]:
    """Return ``bos_token`` and the like, by name, as chat templates see them."""
    tokens = _list(file, "tokens", str)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
    ids = {f"{ours}_token": _token_id(file, theirs, len(tokens)) for ours, theirs in names.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the ids that end an answer, ascending: those that the file names, and control tokens known to end one."""
    tokens = _list(file, "tokens", str)
    named = {_token_id(file, name, len(tokens)) for name in ("eos", "eot", "eom")}
    kinds = _token_types(file, len(tokens))
    known = {i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if _ends_answer(text, kind)}
    if {tokens[each] for each in known}.issuperset(_ENDS_OF_HARMONY):
        # In gpt-oss's format it ends one message of an answer that has several.
        known -= {each for each in known if tokens[each] == _END_OF_MESSAGE}
    return tuple(sorted({token_id for token_id in named if token_id is not None} | known))


def chat_template(file: GgufFile) -> str:
    """Return the template's text; empty if the file has none."""
    template = file.metadata.get("tokenizer.chat_template", "")
    return template if isinstance(template, str) else ""


def _ends_answer(text: str, kind: int) -> bool:
    return kind == TokenType.CONTROL and text in _END_TEXTS


def _splitting(file: GgufFile) -> Splitting:
    name = file.metadata.get(f"{_PREFIX}pre", "default")
    if not isinstance(name, str) or name not in SPLITTINGS:
        known = ", ".join(SPLITTINGS)
        raise ValueError(f"{file.path.name}: {_PREFIX}pre {name!r} is not supported: must be one of {known}")
    return SPLITTINGS[name]


def _byte_level(file: GgufFile, splitting: Splitting) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, normalizers

    tokenizer = Tokenizer(_by_merges(file, ignore_merges=splitting.whole_words_first))
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _by_merges(file: GgufFile, **options: Any) -> "BPE":
    from tokenizers.models import BPE

    tokens, merges = _list(file, "tokens", str), _list(file, "merges", str)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=pairs, **options)
    except Exception as error:  # the library's own class of errors is Exception
        raise ValueError(f"{file.path.name}: {_PREFIX}merges: {error}") from None


def _spaced(file: GgufFile) -> "Tokenizer":
    """Return the tokenizer of Gemma 4, which merges characters of the whole text; a space is a sign of its own."""
    from tokenizers import Tokenizer, decoders, normalizers

    unknown = _token_id(file, "unknown", len(tokens := _list(file, "tokens", str)))
    unknown_text = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(_by_merges(file, unk_token=unknown_text, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _sentence_piece(file: GgufFile) -> "Tokenizer":
    tokens = _list(file, "tokens", str)
    scores = _list(file, "scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path.name}: {_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown = _token_id(file, "unknown", len(tokens))
    scheme = "first" if _flag(file, "add_space_prefix", True) else "never"
    kinds = _token_types(file, len(tokens))
    return sentence_piece_bpe(tokens, scores, kinds, None if unknown is None else tokens[unknown], scheme)


def sentence_piece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    unknown: str | None,
    prefix: str,
    *,
    falls_back_to_bytes: bool = True,
) -> "Tokenizer":
    """Return the tokenizer of SentencePiece's BPE, without its added tokens.

    Args:
        kinds: [n] the :class:`TokenType` of each token.
        unknown: The token for what no other stands for.
        prefix: Which parts of a text get a space before them: ``first``, ``always`` or ``never``.
        falls_back_to_bytes: Whether what is unknown becomes tokens of bytes.
    """
    from tokenizers import models

    model = models.BPE(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        merges=_merges(tokens, scores, kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=falls_back_to_bytes,
    )
    return _with_spaces(model, prefix)


_NEVER = -1e9
"""The score of tokens that no text is to contain by its characters."""


def sentence_piece_unigram(
    tokens: Sequence[str],
    scores: Sequence[float],
    kinds: Sequence[int],
    unknown: str | None,
    prefix: str,
    *,
    falls_back_to_bytes: bool = False,
) -> "Tokenizer":
    """Return the tokenizer of SentencePiece's unigram model; the arguments are those of :func:`sentence_piece_bpe`."""
    from tokenizers import models

    # An unknown character costs 10 more than the lowest score, so no lower one changes which tokens win.
    vocabulary = [
        (text, score if kind == TokenType.NORMAL else _NEVER)
        for text, score, kind in zip(tokens, scores, kinds, strict=True)
    ]
    unknown_id = None if unknown is None else tokens.index(unknown)
    return _with_spaces(models.Unigram(vocabulary, unknown_id, falls_back_to_bytes), prefix)


def _with_spaces(model: Any, prefix: str) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=prefix, split=False)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([] if prefix == "never" else [decoders.Strip(" ", 1, 0)])])
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges that the scores stand for: a pair is joined before others if its result has a higher score."""
    joined = {text: i for i, text in enumerate(tokens) if kinds[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    found = [
        (-scores[token_id], joined[text[:cut]], joined[text[cut:]])
        for text, token_id in joined.items()
        for cut in range(1, len(text))
        if text[:cut] in joined and text[cut:] in joined
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def add_special_tokens(tokenizer: "Tokenizer", tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Make control tokens special, so that no text contains them by accident, and user-defined ones whole."""
    from tokenizers import AddedToken

    special, whole = [], []
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            whole.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _add_ends(tokenizer: "Tokenizer", file: GgufFile, *, begins_by_default: bool) -> None:
    """Let encoding add the tokens that the file wants at the beginning and the end of a text."""
    from tokenizers.processors import TemplateProcessing

    tokens = _list(file, "tokens", str)
    first = _token_id(file, "bos", len(tokens)) if _flag(file, "add_bos_token", begins_by_default) else None
    last = _token_id(file, "eos", len(tokens)) if _flag(file, "add_eos_token", False) else None
    if first is None and last is None:
        return
    added = [(tokens[token_id], token_id) for token_id in (first, last) if token_id is not None]
    single = [*([tokens[first]] if first is not None else []), "$A", *([tokens[last]] if last is not None else [])]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=added)


def _list(file: GgufFile, name: str, kind: type) -> list[Any]:
    values = file.metadata.get(_PREFIX + name)
    if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
        raise ValueError(
            f"{file.path.name}: {_PREFIX}{name} must be a list of {kind.__name__}: the file has no tokenizer"
        )
    return values


def _token_types(file: GgufFile, count: int) -> list[int]:
    """Return the kind of each token; without an entry, all are normal."""
    kinds = file.metadata.get(f"{_PREFIX}token_type", [int(TokenType.NORMAL)] * count)
    if not isinstance(kinds, list) or not all(type(kind) is int for kind in kinds):
        raise ValueError(f"{file.path.name}: {_PREFIX}token_type must be a list of integers, found {kinds!r:.40}")
    if len(kinds) != count:
        raise ValueError(f"{file.path.name}: {_PREFIX}token_type has {len(kinds)} entries for {count} tokens")
    return kinds


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    token_id = file.metadata.get(f"{_PREFIX}{name}_token_id")
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < count):
        raise ValueError(f"{file.path.name}: {_PREFIX}{name}_token_id must be one of {count} tokens, found {token_id}")
    return token_id


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(_PREFIX + name, default)
    if type(value) is not bool:
        raise ValueError(f"{file.path.name}: {_PREFIX}{name} must be true or false, found {value!r}")
    return value


def tokenizer_entries(file: GgufFile) -> Iterator[tuple[int, int]]:
    """Yield where the file holds what the tokenizer and the chat template are made of: begin and end in bytes."""
    for key, span in sorted(file.spans.items()):
        if key.startswith("tokenizer."):
            yield span
