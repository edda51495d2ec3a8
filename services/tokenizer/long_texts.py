"""Encodes long texts: in processes that are started when the first such text comes, and by chunks whose ids are kept.

The prompt of a conversation's next turn begins with that of the turn before. Its text is cut where no rule of the
tokenizer looks across, so that the ids of the whole are those of the chunks one after the other, and only chunks that
are new are encoded. Which places are safe depends on the tokenizer: each kind is tried on 10,000 texts, once, when the
first text comes that would be cut.
"""

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from tokenizers import Tokenizer

from tokenloom.request import errors, packed_ids
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.telemetry.fast_metrics import Counter
from tokenloom.v1.tokenizer_pb2 import EncodeChatRequest, EncodeRequest, TokenizedPrompt

from .encode_worker import EncodeJob, EncodeReply, EncodeSetup
from .encoder import TextEncoder

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 10
"""Texts of at most so many bytes are encoded in threads. A thread holds the interpreter's lock while ids become objects
of Python: 3 ms for 64 KiB of one letter."""
CHUNKED_CHARS = 8 << 10
"""Texts of fewer characters are encoded whole, in less than 3 ms."""
CHUNK_CHARS = 2048
"""A chunk ends at the first safe place behind so many characters."""
NUM_TEXTS = 10_000
"""Texts on which each kind of cut is tried."""
_SECONDS = 120.0
_START_SECONDS = 60.0
_NICENESS = 10
_TEXTS_AT_ONCE = 200
_ENTRY_BYTES = 500
"""What a kept chunk takes beside its text and its ids."""
_MOST_OF_ONE = 16
"""A chunk takes at most one of so many parts of the room."""


class EncodeProcesses:
    """Shares a few processes. The callers take turns before they call."""

    def __init__(self, setup: EncodeSetup, num_processes: int) -> None:
        async def start() -> HelperProcess:
            packed = msgspec.msgpack.encode(setup)
            return await start_helper(f"{__package__}.encode_worker", packed, _reply, _START_SECONDS)

        self._pool = HelperPool(start, num_processes, "encode the text", _SECONDS)

    async def run(self, job: EncodeJob, in_thread: "RunInThread") -> EncodeReply:
        """Return the answer to a call.

        Raises ``InvalidArgument`` for a text that the tokenizer refuses, and as :meth:`.HelperPool.run`.
        """
        # Each look at megabytes takes milliseconds, of the first of which memory has to come from the system.
        message: bytes = await in_thread(msgspec.msgpack.encode, job)
        reply: EncodeReply = await in_thread(_reply, await self._pool.run(message))
        return reply

    async def close(self) -> None:
        """End the processes. Call this when nothing is encoded any more."""
        await self._pool.close()


def _reply(data: bytes) -> EncodeReply:
    reply = msgspec.msgpack.decode(data, type=EncodeReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, reply.field or None)
    return reply


RunInThread: TypeAlias = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments in a thread for texts."""


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
_AWKWARD: Final = (
    *" \n\t\r\u00a0\u200b\u3000'\",./_<|{=aB1éßİΩς你½²ﬁ😀\u0301\u200d\u2019\ufffd\x00",
    *("  ", "\n\n", "\r\n", "'s", "...", "12", "123456"),
    *("e\u0301", "日本語", "한국", "हिन्दी", "ไทย", "👩\u200d👩", "🇩🇪"),
)
_SPELLED = str.maketrans("ĠĊĉč▁", " \n\t\r ")
"""How vocabularies spell blanks."""


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


class CutTrials:
    """Tries on texts where those of one tokenizer may be cut."""

    def __init__(self, tokenizer: Tokenizer, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """``is_wanted``: asked now and then; when it returns False no kind of cut is safe."""
        self._tokenizer = tokenizer
        self._is_wanted = is_wanted
        around = tokenizer.encode("a")
        is_text = [not is_special for is_special in around.special_tokens_mask]
        num_before, num_after = (mask.index(True) if any(mask) else 0 for mask in (is_text, is_text[::-1]))
        self._prefix, self._suffix = around.ids[:num_before], around.ids[len(around.ids) - num_after :]
        self._vocabulary = sorted(tokenizer.get_vocab(with_added_tokens=False))
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = [token.content for token in added]
        self._stripping = [token.content for token in added if token.lstrip or token.rstrip]
        """Take the blanks beside them. Among thousands of tokens chance would not choose each of these few."""
        spelled = [token.translate(_SPELLED) for token in self._vocabulary]
        some = Random(0).sample(spelled, min(len(spelled), 4000))
        blanks = [token for token in spelled if token.isspace()]
        self._pieces = [each for each in (_AWKWARD, self._added, blanks, some, some) if each]
        """Of what texts are made."""

    def find(self, num_texts: int) -> SafeCuts | None:
        """Return how texts may be cut; None: no kind of cut is safe. ``num_texts``: on how many each kind is tried;
        10,000 take about half a second."""
        if self._tokenizer.truncation is not None or self._tokenizer.padding is not None:
            return None
        kinds = [kind for kind in CUT_KINDS if self._is_safe(kind, num_texts)]
        return SafeCuts(kinds, packed_ids.pack(self._prefix), packed_ids.pack(self._suffix)) if kinds else None

    def _is_safe(self, kind: CutKind, num_texts: int) -> bool:
        """Return whether the ids of a text are those of both sides of such a cut, for every text that is tried."""
        is_crossing, is_cut = re.compile(kind.crossing).search, re.compile(kind.pattern).search
        if any(map(is_crossing, self._vocabulary)) or any(map(is_cut, self._added)):
            return False
        texts = chain(_texts_with(self._stripping, kind), islice(_texts(kind, self._pieces), num_texts))
        encode, adds = self._tokenizer.encode_batch_fast, True
        while pairs := list(islice(texts, _TEXTS_AT_ONCE)):
            if not self._is_wanted():
                return False
            adds = not adds  # special tokens around every second batch
            prefix, suffix = (self._prefix, self._suffix) if adds else ([], [])
            wholes = encode([one + other for one, other in pairs], add_special_tokens=adds)
            sides = [encode(list(side), add_special_tokens=False) for side in zip(*pairs, strict=True)]
            for whole, one, other in zip(wholes, *sides, strict=True):
                if whole.ids != [*prefix, *one.ids, *other.ids, *suffix]:
                    return False
        return True


def _texts_with(tokens: Sequence[str], kind: CutKind) -> Iterator[tuple[str, str]]:
    """Yield texts with each token on either side of a cut, if it may stand there."""
    for token in tokens:
        pairs = chain(((token, after) for after in kind.afters), ((before, token) for before in kind.befores))
        yield from (pair for pair in pairs if kind.is_between(*pair))


def _texts(kind: CutKind, pieces: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield texts, each as both sides of a cut."""
    random, is_between = Random(kind.name), kind.is_between
    ends = [each for of_kind in pieces for each in of_kind if is_between(each, kind.afters[0])] or kind.befores
    starts = [each for of_kind in pieces for each in of_kind if is_between(kind.befores[0], each)] or kind.afters
    while True:
        before = [random.choice(random.choice(pieces)) for _ in range(random.randrange(5))]
        after = [random.choice(random.choice(pieces)) for _ in range(random.randrange(5))]
        before.append(random.choice(random.choice((kind.befores, ends))))
        one, other = "".join(before), "".join([random.choice(random.choice((kind.afters, starts))), *after])
        if is_between(one, other):
            yield one, other


Scope: TypeAlias = tuple[str, bytes]
"""Whose texts they are: the tenant, and the salt of the request's KV blocks."""


class ChunkCache:
    """Keeps the ids of chunks, by scope: the time that an answer takes shows no tenant the texts of another.

    Several threads may use it.
    """

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: room for chunks with their ids; those used longest ago give way."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        # By tenant and not by scope: a client chooses salts, as many as it likes.
        self._tenants: OrderedDict[str, OrderedDict[tuple[bytes, str], bytes]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def find(self, scope: Scope, chunks: Sequence[str]) -> list[bytes | None]:
        """Return the packed ids of each chunk; None: they are not kept."""
        tenant, salt = scope
        with self._lock:
            if (kept := self._tenants.get(tenant)) is None:
                return [None] * len(chunks)
            self._tenants.move_to_end(tenant)
            keys = [(salt, chunk) for chunk in chunks]
            found = [kept.get(key) for key in keys]
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    kept.move_to_end(key)
            return found

    def put(self, scope: Scope, chunk: str, ids: bytes) -> None:
        """Keep the packed ids of a chunk, if it is not too large."""
        tenant, salt = scope
        key, size = (salt, chunk), _size(chunk, ids)
        with self._lock:
            if size > self._max_bytes // _MOST_OF_ONE or key in self._tenants.get(tenant, ()):
                return
            self._tenants.setdefault(tenant, OrderedDict())[key] = ids
            self._tenants.move_to_end(tenant)
            self._sizes[tenant] = self._sizes.get(tenant, 0) + size
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                # One that has more than half of the room makes room itself: it cannot drive out all others.
                is_large = self._sizes[tenant] > self._max_bytes // 2
                self._drop_oldest(tenant if is_large else next(iter(self._tenants)))

    def _drop_oldest(self, tenant: str) -> None:
        kept = self._tenants[tenant]
        (_, chunk), ids = kept.popitem(last=False)
        size = _size(chunk, ids)
        self.num_bytes -= size
        self._sizes[tenant] -= size
        if not kept:
            del self._tenants[tenant], self._sizes[tenant]


def _size(chunk: str, ids: bytes) -> int:
    return chunk.__sizeof__() + len(ids) + _ENTRY_BYTES


class LongResponse(NamedTuple):
    """Answers a call for the ids of one text."""

    data: bytes
    """An ``EncodeResponse``, or ``EncodeChatResponse``, as it is sent."""
    num_tokens: int


@dataclass(slots=True)
class _ChunkedText:
    scope: Scope
    chunks: list[str]
    ids: list[bytes | None]

    @property
    def num_cached(self) -> int:
        """Tokens of the chunks whose ids were kept."""
        return sum(len(ids) for ids in self.ids if ids is not None) // packed_ids.ID_BYTES

    @property
    def missing(self) -> list[str]:
        return [chunk for chunk, ids in zip(self.chunks, self.ids, strict=True) if ids is None]


class LongTexts:
    """Encodes long texts by chunks, once it is known where the tokenizer's texts may be cut.

    Attributes:
        processes: They encode what is long and new.
        cuts: Where texts are cut; None: nowhere, or it is not known yet.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: TextEncoder,
        processes: EncodeProcesses,
        cached_tokens: Counter,
        max_bytes: int,
    ) -> None:
        """``cached_tokens``: counts tokens whose ids were kept. ``max_bytes``: room for chunks that are kept; 0: texts
        are not cut."""
        self.processes = processes
        self.cuts: SafeCuts | None = None
        self._cached_tokens = cached_tokens
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._cache = ChunkCache(max_bytes)
        self._is_asked = not max_bytes
        self._is_closed = False

    async def encode(
        self,
        text: str,
        request: EncodeRequest | EncodeChatRequest,
        run: RunInThread,
        rest: TokenizedPrompt,
        *,
        special: bool = False,
    ) -> LongResponse | None:
        """Return the response for a text; None: it must be encoded whole.

        Args:
            rest: What else its prompt holds.
            special: Add special tokens around it.

        Raises as :meth:`TextEncoder.encode` and :meth:`EncodeProcesses.run`.
        """
        if (cuts := self.cuts) is None or request.want_token_strings:
            if not self._is_asked:
                self._is_asked = True
                threading.Thread(target=self._find_behind_others, name="find-cuts").start()
            return None
        found: _ChunkedText = await run(self._look_up, cuts, text, (request.tenant, request.cache_salt))
        self._cached_tokens.inc(found.num_cached)
        encoded: Sequence[bytes] = []
        if missing := found.missing:
            if sum(map(len, missing)) <= SHORT_BYTES:
                encoded = await run(self._encoder.encode_chunks, missing)
            else:
                encoded = (await self.processes.run(EncodeJob(chunks=missing), run)).chunks
        around = (cuts.prefix, cuts.suffix) if special else (b"", b"")
        response: LongResponse = await run(self._join, found, encoded, around, request, rest)
        return response

    def find_cuts(self) -> None:
        """Find where texts may be cut. No text differs afterwards if this fails."""
        try:
            self.cuts = CutTrials(self._tokenizer, lambda: not self._is_closed).find(NUM_TEXTS)
        except BaseException:  # the library panics on some texts with an error that no other handler would catch
            log.exception("the ids of chunks of long texts are not kept: the tokenizer fails on texts that were tried")
            return
        names = ", ".join(kind.name for kind in self.cuts.kinds) if self.cuts is not None else "none"
        log.info("long texts are cut at places of these kinds, where no text of %d differed: %s", NUM_TEXTS, names)

    def close(self) -> None:
        """Stop looking for cuts."""
        self._is_closed = True

    def _find_behind_others(self) -> None:
        # The library's own threads, which all texts share, are as nice as the thread whose text starts them.
        self._tokenizer.encode_batch_fast([""])
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self.find_cuts()

    def _look_up(self, cuts: SafeCuts, text: str, scope: Scope) -> _ChunkedText:
        self._encoder.check_size(text)
        chunks = cuts.chunks(text)
        return _ChunkedText(scope, chunks, self._cache.find(scope, chunks))

    def _join(
        self,
        text: _ChunkedText,
        encoded: Sequence[bytes],
        around: tuple[bytes, bytes],
        request: EncodeRequest | EncodeChatRequest,
        rest: TokenizedPrompt,
    ) -> LongResponse:
        """Return the response for a text, and keep the ids of the chunks that were missing."""
        (prefix, suffix), left = around, iter(encoded)
        parts = [prefix]
        for chunk, ids in zip(text.chunks, text.ids, strict=True):
            if ids is None:
                ids = next(left)
                self._cache.put(text.scope, chunk, ids)
            parts.append(ids)
        parts.append(suffix)
        num_tokens = sum(map(len, parts)) // packed_ids.ID_BYTES
        return LongResponse(self._encoder.response_of_chunks(parts, request, rest), num_tokens)
