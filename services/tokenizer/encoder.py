"""Turns text into token ids and back, in threads, so that a long text never blocks the event loop."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from tokenizers import Tokenizer

from tokenloom.model_files.sentence_texts import SentenceTexts
from tokenloom.request import errors
from tokenloom.request.prefix_schedule import prefix_hashes
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

from .spelled_tokens import PlainTextEncoder, Rendered, unmasked

MAX_WAITING = 1024
"""Calls that run in a thread or wait for one; more are refused with an error that invites a retry."""

T = TypeVar("T")


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
    encoding = tokenizer.encode(rule.prefix + text, second, add_special_tokens=rule.add_special_tokens)
    ids, types = encoding.ids, encoding.type_ids if second is not None else ()
    num_skipped, cut = min(rule.num_skipped, len(ids)), rule.cut
    if cut is not None and len(ids) > cut.max_tokens:
        kept = cut.kept(encoding.sequence_ids)
        ids, types = [ids[index] for index in kept], [types[index] for index in kept] if types else ()
        num_skipped = sum(index < num_skipped for index in kept)
    strings = encoding.tokens if want_strings else ()
    return EncodedText(ids, strings, types.index(1) if 1 in types else 0, num_skipped)


class TextEncoder:
    """Runs a tokenizer in its own threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        block_size: int,
        max_text_bytes: int,
        num_threads: int,
        vector_texts: SentenceTexts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vector_texts = VectorTexts(tokenizer, vector_texts)
        self._block_size = block_size
        self._max_text_bytes = max_text_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._waiting = 0

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        want_hashes: bool,
        salt: bytes,
        want_token_strings: bool = False,
        second_texts: Sequence[str] = (),
        cut: PromptTruncation | None = None,
        prompt_name: str | None = None,
    ) -> Coroutine[Any, Any, list[TokenizedPrompt]]:
        """Return the ids of each text and, if wanted, the prefixes of its block hashes and the strings of its tokens.

        Args:
            second_texts: What to join to each text; empty: nothing.
            cut: Limits the tokens of each prompt; None: nothing does. Where the files of sentence-transformers limit
                them further, theirs holds.
            prompt_name: Of the prompt of texts that become vectors; empty: the default; None: they become none.

        Raises ``InvalidArgument`` for a text over the size limit or one that makes the tokenizer fail,
        ``ResourceExhausted`` when too many calls wait.
        """
        if second_texts and len(second_texts) != len(texts):
            raise errors.InvalidArgument("second_texts must be empty or as many as texts.", "second_texts")
        for text in (*texts, *second_texts):
            if 4 * len(text) > self._max_text_bytes:  # a character has at most four bytes: most need not be measured
                self._check_size(text)
        rule = TextRule() if prompt_name is None else self._vector_texts.rule(prompt_name)
        rule = rule._replace(add_special_tokens=add_special_tokens and rule.add_special_tokens).cut_to(cut)
        pairs = list(zip_longest(texts, second_texts))
        return self._in_thread(self._encode, pairs, rule, want_hashes, salt, want_token_strings)

    def encode_chat(
        self, rendered: Rendered, *, want_hashes: bool, salt: bytes, want_token_strings: bool = False
    ) -> Coroutine[Any, Any, list[TokenizedPrompt]]:
        """Return the ids of a rendered conversation, whose template has written the special tokens: one prompt.

        Raises as :meth:`encode` does.
        """
        if not rendered.masks:
            if 4 * len(rendered.text) > self._max_text_bytes:
                self._check_size(rendered.text)
            rule = TextRule(add_special_tokens=False)
            return self._in_thread(self._encode, [(rendered.text, None)], rule, want_hashes, salt, want_token_strings)
        return self._in_thread(self._encode_masked, rendered, want_hashes, salt, want_token_strings)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a complete sequence; ids that the tokenizer does not know have none."""
        return await self._in_thread(self._tokenizer.decode, token_ids, skip_special_tokens)

    def close(self) -> None:
        """Let running calls end, and drop the waiting ones."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self,
        pairs: Sequence[tuple[str, str | None]],
        rule: TextRule,
        want_hashes: bool,
        salt: bytes,
        want_token_strings: bool,
    ) -> list[TokenizedPrompt]:
        prompts = []
        for text, second in pairs:
            encoded = encode_text(self._tokenizer, text, second, rule, want_strings=want_token_strings)
            prompt = TokenizedPrompt(
                token_ids=encoded.token_ids,
                token_strings=encoded.strings,
                first_part_tokens=encoded.first_part_tokens,
                skipped_tokens=encoded.skipped_tokens,
            )
            if want_hashes:
                prompt.block_hash_prefixes.extend(prefix_hashes(encoded.token_ids, self._block_size, salt))
            prompts.append(prompt)
        return prompts

    @cached_property
    def _plain_texts(self) -> PlainTextEncoder:
        return PlainTextEncoder(self._tokenizer)

    def _encode_masked(
        self, rendered: Rendered, want_hashes: bool, salt: bytes, want_token_strings: bool
    ) -> list[TokenizedPrompt]:
        # In the thread: putting 100,000 tokens back into 1 MB takes 0.1 s.
        self._check_size(unmasked(rendered.text, rendered.masks))
        ids, strings = self._plain_texts.encode(rendered)
        prompt = TokenizedPrompt(
            token_ids=ids,
            token_strings=strings if want_token_strings else (),
            block_hash_prefixes=prefix_hashes(ids, self._block_size, salt) if want_hashes else (),
            plain_text_tokens=sorted(rendered.masks.values()),
        )
        return [prompt]

    def _check_size(self, text: str) -> None:
        if len(text.encode()) > self._max_text_bytes:
            raise errors.InvalidArgument(f"prompt: a text may have at most {self._max_text_bytes} bytes.", "prompt")

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        if self._waiting >= MAX_WAITING:
            raise errors.ResourceExhausted(f"{MAX_WAITING} texts already wait to be tokenized; retry.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, _contain, work, arguments)
        finally:
            self._waiting -= 1


def _contain(work: Callable[..., T], arguments: Sequence[object]) -> T:
    """Call the library, which panics on some inputs with a BaseException that no other handler would catch."""
    try:
        return work(*arguments)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError, errors.TokenloomError)):
            raise
        raise errors.InvalidArgument("prompt: the tokenizer fails on this text.", "prompt") from error
