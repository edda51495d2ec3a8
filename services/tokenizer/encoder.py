"""Turns text into token ids and back: what a thread of the tokenizer, or a process that it started, computes. Cuts long
texts at places across which a tokenizer does not look."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple

from tokenizers import Tokenizer

from tokenloom.model_files.sentence_texts import SentenceTexts
from tokenloom.request import errors, packed_ids
from tokenloom.request.prefix_schedule import MAX_BLOCKS, MediaTokens, prefix_hashes
from tokenloom.v1.tokenizer_pb2 import (
    DecodeRequest,
    DecodeResponse,
    EncodeChatRequest,
    EncodeRequest,
    EncodeResponse,
    TokenizedPrompt,
)
from tokenloom.v1.types_pb2 import MediaItem, MediaRun

from .spelled_tokens import PlainTextEncoder, Rendered, unmasked

if TYPE_CHECKING:
    from .media.media_reader import MediaReader


@dataclass(frozen=True, slots=True)
class PromptTruncation:
    """Limits the tokens of a prompt: drops tokens of its text, or of a pair's second text, never special tokens."""

    max_tokens: int
    keep_first: bool = False
    """Keep the first tokens instead of the last ones."""

    def kept(self, sequence_ids: Sequence[int | None]) -> Sequence[int]:
        """Return the positions to keep. ``sequence_ids``: the text of each token; None for special tokens."""
        droppable: list[int] = []
        for sequence in (1, 0):
            positions = [position for position, each in enumerate(sequence_ids) if each == sequence]
            droppable += reversed(positions) if self.keep_first else positions
        dropped = set(droppable[: len(sequence_ids) - self.max_tokens])
        return [position for position in range(len(sequence_ids)) if position not in dropped]


class TextRule(NamedTuple):
    """Says how texts become tokens."""

    add_special_tokens: bool = True
    prefix: str = ""
    """Stands before each text."""
    num_skipped: int = 0
    """So many tokens of the prefix take no part in a vector."""
    cut: PromptTruncation | None = None
    """Limits the tokens of each prompt; None: nothing does."""

    def cut_to(self, cut: PromptTruncation | None) -> "TextRule":
        """Return the rule with a request's own limit, unless it would keep as much as this one does; None: it has
        none."""
        # As in vLLM, no request reaches beyond max_seq_length: the model was not trained on longer texts.
        is_wider = cut is None or (self.cut is not None and cut.max_tokens >= self.cut.max_tokens)
        return self if is_wider else self._replace(cut=cut)


_OF_CHATS = TextRule(add_special_tokens=False)


class VectorTexts:
    """Gives the rules of texts that become vectors, as the files of sentence-transformers say."""

    def __init__(self, tokenizer: Tokenizer, texts: SentenceTexts | None) -> None:
        """``texts``: None: the checkpoint has no such files."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._rules: dict[str, TextRule] = {}  # at most as many as the checkpoint has prompts

    def rule(self, prompt_name: str) -> TextRule:
        """Return the rule with the prompt of this name; empty: with the default. Raises ``InvalidArgument``."""
        if prompt_name not in self._rules:
            self._rules[prompt_name] = self._make(prompt_name)
        return self._rules[prompt_name]

    def _make(self, prompt_name: str) -> TextRule:
        texts = self._texts
        if texts is None:
            if prompt_name:
                raise errors.InvalidArgument("prompt_name: the model's files define no prompts", "prompt_name")
            return TextRule()
        try:
            prefix = texts.prompt(prompt_name)
        except ValueError as error:
            raise errors.InvalidArgument(str(error), "prompt_name") from None
        cut = PromptTruncation(texts.max_tokens, texts.keeps_first) if texts.max_tokens else None
        rule = TextRule(texts.adds_special_tokens, prefix, cut=cut)
        if texts.pools_prompt or not prefix:
            return rule
        encoding = self._tokenizer.encode(prefix, add_special_tokens=texts.adds_special_tokens)
        length = min(len(encoding.ids), texts.max_tokens or len(encoding.ids))
        # A special token at the end comes after the text, as in sentence-transformers. Blanks may have no token at all.
        return rule._replace(num_skipped=length - sum(encoding.special_tokens_mask[-1:]))


class EncodedText(NamedTuple):
    """Holds the tokens of a text, or of a pair."""

    token_ids: list[int]
    strings: Sequence[str]
    """Of all tokens, before any is cut; empty unless asked for."""
    first_part_tokens: int
    """As in ``PoolingParams``, and so is the next one."""
    skipped_tokens: int


def encode_text(
    tokenizer: Tokenizer, text: str, second: str | None, rule: TextRule, *, want_strings: bool = False
) -> EncodedText:
    """Return the tokens of a text, or of a pair."""
    whole = rule.prefix + text
    # The calls of one text hold the interpreter's lock: 1 MB of one word let no heartbeat out for 2.4 s.
    encode = tokenizer.encode_batch if want_strings else tokenizer.encode_batch_fast  # which has no strings
    (encoding,) = encode([whole if second is None else (whole, second)], add_special_tokens=rule.add_special_tokens)
    ids, types = encoding.ids, encoding.type_ids if second is not None else ()
    num_skipped, cut = min(rule.num_skipped, len(ids)), rule.cut
    if cut is not None and len(ids) > cut.max_tokens:
        kept = cut.kept(encoding.sequence_ids)
        ids, types = [ids[index] for index in kept], [types[index] for index in kept] if types else ()
        num_skipped = sum(index < num_skipped for index in kept)
    strings = encoding.tokens if want_strings else ()
    return EncodedText(ids, strings, types.index(1) if 1 in types else 0, num_skipped)


class TextEncoder:
    """Answers the calls of a tokenizer. Several threads may use it.

    Attributes:
        tokenizer: Of the checkpoint.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        block_size: int,
        max_text_bytes: int,
        vector_texts: SentenceTexts | None = None,
        reader: "MediaReader | None" = None,
    ) -> None:
        """``vector_texts``: how texts become vectors; None: the checkpoint does not say. ``reader``: how images
        and sounds stand in prompts; None: the model reads none."""
        self.tokenizer = tokenizer
        self._vector_texts = VectorTexts(tokenizer, vector_texts)
        self._block_size = block_size
        self._max_text_bytes = max_text_bytes
        self._reader = reader

    def encode(self, request: EncodeRequest) -> EncodeResponse:
        """Return the ids of each text and, if wanted, the prefixes of its block hashes and the strings of its tokens.

        Raises ``InvalidArgument`` for a text over the size limit or one that makes the tokenizer fail.
        """
        texts, second_texts = request.texts, request.second_texts
        if second_texts and len(second_texts) != len(texts):
            raise errors.InvalidArgument("second_texts must be empty or as many as texts.", "second_texts")
        for text in (*texts, *second_texts):
            if 4 * len(text) > self._max_text_bytes:  # a character has at most four bytes: most need not be measured
                self.check_size(text)
        name = request.prompt_name if request.HasField("prompt_name") else None
        rule = TextRule() if name is None else self._vector_texts.rule(name)
        # Where the files of sentence-transformers limit the tokens further, theirs holds.
        cut = PromptTruncation(request.max_tokens, request.keep_first) if request.max_tokens else None
        rule = rule._replace(add_special_tokens=request.add_special_tokens and rule.add_special_tokens).cut_to(cut)
        prompts = []
        for text, second in zip_longest(texts, second_texts):
            encode = partial(encode_text, self.tokenizer, text, second, rule, want_strings=request.want_token_strings)
            prompts.append(self._prompt(encode, request))
        return EncodeResponse(prompts=prompts)

    def encode_chat(
        self, rendered: Rendered, request: EncodeChatRequest, media: Sequence[MediaItem] = ()
    ) -> TokenizedPrompt:
        """Return the ids of a rendered conversation, whose template has written the special tokens.

        ``request``: of which only the wishes are read. ``media``: what the text holds already; the items get
        their places here. Raises as :meth:`encode`.
        """
        want_strings = request.want_token_strings
        if not rendered.masks:
            if 4 * len(rendered.text) > self._max_text_bytes:
                self.check_size(rendered.text)
            encode = partial(encode_text, self.tokenizer, rendered.text, None, _OF_CHATS, want_strings=want_strings)
            return self._prompt(encode, request, media)
        self.check_size(unmasked(rendered.text, rendered.masks))
        prompt = self._prompt(partial(self._encode_masked, rendered, want_strings), request, media)
        prompt.plain_text_tokens.extend(sorted(rendered.masks.values()))
        return prompt

    def place(self, request: EncodeChatRequest) -> TokenizedPrompt:
        """Return the ids of a request with the places of its media. Raises ``InvalidArgument``."""
        assert self._reader is not None, "the caller has asked"
        ids = list(request.token_ids)
        try:
            items = self._reader.items(request.media, request.cache_salt)
            return self._prompt(lambda: EncodedText(ids, (), 0, 0), request, items)
        except errors.InvalidArgument as error:
            raise error.renamed({"messages": "token_ids"}) from None

    def encode_chunks(self, chunks: Sequence[str]) -> list[bytes]:
        """Return the packed ids of each part of a text. Raises as :meth:`encode`."""
        try:
            encodings = self.tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        except BaseException as error:
            raise contained(error) from error
        return [packed_ids.pack(encoding.ids) for encoding in encodings]

    def response_of_chunks(
        self, chunks: Sequence[bytes], request: EncodeRequest | EncodeChatRequest, rest: TokenizedPrompt
    ) -> bytes:
        """Return the response, as it is sent, with the prompt of which these are the packed ids, in parts.

        Args:
            request: Of which only the wishes are read.
            rest: What else the prompt holds, without its block hashes.
        """
        num_ids = sum(map(len, chunks)) // packed_ids.ID_BYTES
        prompt = TokenizedPrompt()
        prompt.CopyFrom(rest)
        if request.want_hashes:
            hashed = TokenizedPrompt(packed_token_ids=_first(chunks, MAX_BLOCKS * self._block_size))
            hashes = prefix_hashes(packed_ids.ids_of(hashed), self._block_size, request.cache_salt)
            prompt.block_hash_prefixes.extend(hashes)
        if _is_packed(num_ids, request):
            return packed_ids.response_of(chunks, prompt)
        prompt.packed_token_ids = b"".join(chunks)
        packed_ids.unpack(prompt)
        return EncodeResponse(prompts=[prompt]).SerializeToString()

    def decode(self, request: DecodeRequest) -> DecodeResponse:
        """Return the text of a complete sequence; ids that the tokenizer does not know have none."""
        # As in `encode_text`: `decode` would hold the lock.
        ids, skips = list(request.token_ids), request.skip_special_tokens
        try:
            (text,) = self.tokenizer.decode_batch([ids], skip_special_tokens=skips)
        except BaseException as error:
            raise contained(error) from error
        return DecodeResponse(text=text)

    @cached_property
    def _plain_texts(self) -> PlainTextEncoder:
        return PlainTextEncoder(self.tokenizer)

    def _encode_masked(self, rendered: Rendered, want_strings: bool) -> EncodedText:
        return EncodedText(*self._plain_texts.encode(rendered, want_strings=want_strings), 0, 0)

    def _prompt(
        self,
        encode: Callable[[], EncodedText],
        request: EncodeRequest | EncodeChatRequest,
        media: Sequence[MediaItem] = (),
    ) -> TokenizedPrompt:
        try:
            encoded = encode()
        except BaseException as error:
            raise contained(error) from error
        ids = encoded.token_ids
        if media:
            assert self._reader is not None, "the caller has expanded the text with it"
            self._reader.place(media, ids)
        is_packed = len(ids) > packed_ids.LONG_PROMPT and _is_packed(len(ids), request)
        prompt = TokenizedPrompt(
            token_ids=() if is_packed else ids,
            packed_token_ids=packed_ids.pack(ids) if is_packed else b"",
            token_strings=encoded.strings,
            first_part_tokens=encoded.first_part_tokens,
            skipped_tokens=encoded.skipped_tokens,
        )
        if media:
            prompt.media.extend(media)
        if request.want_hashes:
            tokens = [MediaTokens(*_place(run), item.key) for item in media for run in item.runs] if media else ()
            hashes = prefix_hashes(ids, self._block_size, request.cache_salt, tokens)
            prompt.block_hash_prefixes.extend(hashes)
        return prompt

    def check_size(self, text: str) -> None:
        """Raise ``InvalidArgument`` for a text over the size limit."""
        if len(text.encode()) > self._max_text_bytes:
            raise errors.InvalidArgument(f"prompt: a text may have at most {self._max_text_bytes} bytes.", "prompt")


def _first(chunks: Sequence[bytes], most: int) -> bytes:
    """Return the first of packed ids in parts, at least ``most`` of them if there are so many."""
    taken: list[bytes] = []
    num_bytes = 0
    for chunk in chunks:
        if num_bytes >= most * packed_ids.ID_BYTES:
            break
        taken.append(chunk[: most * packed_ids.ID_BYTES])
        num_bytes += len(taken[-1])
    return b"".join(taken)


def _is_packed(num_ids: int, request: EncodeRequest | EncodeChatRequest) -> bool:
    return request.takes_packed_ids and packed_ids.LONG_PROMPT < num_ids <= packed_ids.MOST_IDS


def _place(run: MediaRun) -> tuple[int, int, int]:
    return run.position, run.num_tokens, run.row_offset


def contained(error: BaseException) -> BaseException:
    """Return what to raise for an error of the library, which panics on some inputs with a BaseException that no other
    handler would catch."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
        return error
    return errors.InvalidArgument("prompt: the tokenizer fails on this text.", "prompt")


class CutKind(NamedTuple):
    """Describes places where a text may be cut."""

    name: str
    mark: str
    """The character beside such a place."""
    pattern: str
    """Ends at such a place, and begins at most one character before the mark."""
    crossing: str
    """Is found in the tokens of a vocabulary, as it spells them, that reach across such a place."""
    befores: Sequence[str]
    """What may stand before such a place."""
    afters: Sequence[str]
    """What may stand behind it."""

    def is_between(self, one: str, other: str) -> bool:
        """Return whether such a place is between two texts."""
        return any(match.end() == len(one) for match in re.finditer(self.pattern, one + other))


# Patterns of pre-tokenizers end a match behind a line's end, or begin one with the blank before a word; GPT-2's do only
# the latter.
CUT_KINDS: Final = (
    CutKind(
        "line",
        "\n",
        r"\n(?=[^\W_])",
        r"\n[^\W_]|Ċ[A-Za-z0-9Â-ô]",  # vocabularies of bytes spell the first byte of other letters as Â to ô
        ("\n", "\n\n", " \n", "\n \n", "\t\n", "\r\n", ")\n", ");\n\n", ".\n", "\u3000\n", "1\n", "<\n", "-- \n"),
        ("a", "The", "I'm", "2", "2024", "10th", "é", "Ω", "你好", "こ", "한", "ш", "ب", "हि", "ก", "x_y"),
    ),
    CutKind(
        "word",
        " ",
        r"[A-Za-z](?= [A-Za-z])",
        r"[A-Za-z][ Ġ▁]",
        ("a", "the", "THE", "it's", "we'll", "x", "\nZ", "2nd", "éa", "你a", "_b", "don't", "e\u0301q", "\tq", "<a"),
        (" a", " The", " I'm", " s", " re the", " ll", " x2", " q\u0301", " NOT", " b_c", " eé"),
    ),
)


CHUNK_CHARS = 2048
"""A chunk ends at the first safe place behind so many characters."""
SEARCHED_CHARS = 1 << 16
"""Characters of a text that are searched for a place at a time."""
_AHEAD_CHARS = 2
"""Characters behind a place that patterns look at."""
PAUSE_SECONDS = 0.0005
"""Between two parts of a text that were searched: the event loop, which waits for the interpreter's lock, gets it."""


class SafeCuts:
    """Cuts texts of one tokenizer. A text that goes on is cut at the same places."""

    def __init__(self, kinds: Sequence[CutKind], prefix: bytes, suffix: bytes) -> None:
        """``kinds``: those that are safe, at least one. ``prefix``, ``suffix``: the special tokens that the tokenizer
        adds around a text, packed."""
        self.kinds = kinds
        self.prefix, self.suffix = prefix, suffix
        self._marks = [kind.mark for kind in kinds]
        self._find = re.compile("|".join(kind.pattern for kind in kinds)).search

    def chunks(self, text: str) -> list[str]:
        """Return the chunks of a text; only the last one is shorter than :data:`CHUNK_CHARS`."""
        found, start, rested = [], 0, 0
        while (end := self._next_cut(text, start + CHUNK_CHARS - 1)) is not None:
            found.append(text[start:end])
            start = end
            if start - rested > SEARCHED_CHARS:
                rested = start
                time.sleep(PAUSE_SECONDS)
        found.append(text[start:])
        return found

    def _next_cut(self, text: str, start: int) -> int | None:
        """Return the first place from ``start`` on; None: there is none."""
        # By parts: in 4 MB of one word the search held the interpreter's lock for 80 ms. And only where a mark is: the
        # search for a character takes a hundredth of that.
        while start < len(text):
            end = start + SEARCHED_CHARS
            marks = [at for mark in self._marks if (at := text.find(mark, start, end + _AHEAD_CHARS)) >= 0]
            if marks:
                if (match := self._find(text, max(start, min(marks) - 1), end + _AHEAD_CHARS)) is not None:
                    return match.end()
                time.sleep(PAUSE_SECONDS)
            start = end
        return None
