"""Encodes long texts: in processes that are started when the first such text comes, and by chunks whose ids are kept.

The prompt of a conversation's next turn begins with that of the turn before. Its text is cut where no rule of the
tokenizer looks across, so that the ids of the whole are those of the chunks one after the other, and only chunks that
are new are encoded. Which places are safe depends on the tokenizer: each kind is tried on 10,000 texts, once, when the
first text comes that would be cut, in a process of its own.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from tokenloom.request import errors, packed_ids
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.telemetry.fast_metrics import Counter
from tokenloom.v1.tokenizer_pb2 import EncodeChatRequest, EncodeRequest, TokenizedPrompt

from .encode_worker import NUM_TEXTS, EncodeJob, EncodeReply, EncodeSetup
from .encoder import CUT_KINDS, SafeCuts, TextEncoder

log = logging.getLogger(__name__)

SHORT_BYTES = 64 << 10
"""Texts of at most so many bytes are encoded in threads. A thread holds the interpreter's lock while ids become objects
of Python: 3 ms for 64 KiB of one letter."""
CHUNKED_CHARS = 8 << 10
"""Texts of fewer characters are encoded whole, in less than 3 ms."""
_SECONDS = 120.0
_START_SECONDS = 60.0
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
        # One for each time: a pool that was closed has no process that its callers could wait for.
        self._trials: Callable[[], HelperPool] = lambda: HelperPool(start, 1, "try where texts may be cut", _SECONDS)

    async def run(self, job: EncodeJob, in_thread: "RunInThread") -> EncodeReply:
        """Return the answer to a call.

        Raises ``InvalidArgument`` for a text that the tokenizer refuses, and as :meth:`.HelperPool.run`.
        """
        # Each look at megabytes takes milliseconds, of the first of which memory has to come from the system.
        message: bytes = await in_thread(msgspec.msgpack.encode, job)
        reply: EncodeReply = await in_thread(_reply, await self._pool.run(message))
        return reply

    async def find_cuts(self) -> SafeCuts | None:
        """Return where texts may be cut; None: nowhere. Raises as :meth:`run`."""
        # A thread would hold the interpreter's lock for most of a second. One that stepped back behind other processes
        # held it while it waited for a processor: short texts beside it took up to half a second.
        trials = self._trials()
        try:
            reply: EncodeReply = _reply(await trials.run(msgspec.msgpack.encode(EncodeJob(tries_cuts=True))))
        finally:
            await trials.close()
        kinds = [kind for kind in CUT_KINDS if kind.name in reply.cut_kinds]
        return SafeCuts(kinds, *reply.around) if kinds else None

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
        self, encoder: TextEncoder, processes: EncodeProcesses, cached_tokens: Counter, max_bytes: int
    ) -> None:
        """``cached_tokens``: counts tokens whose ids were kept. ``max_bytes``: room for chunks that are kept; 0: texts
        are not cut."""
        self.processes = processes
        self.cuts: SafeCuts | None = None
        self._cached_tokens = cached_tokens
        self._encoder = encoder
        self._cache = ChunkCache(max_bytes)
        self._finds_cuts = bool(max_bytes)
        self.finding: asyncio.Task[None] | None = None
        """Tries where texts may be cut; None: no text has come that would be."""

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
            if self._finds_cuts and self.finding is None:
                self.finding = asyncio.get_running_loop().create_task(self._find_cuts(), name="find cuts")
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

    async def close(self) -> None:
        """Stop looking for cuts."""
        if self.finding is not None:
            self.finding.cancel()
            await asyncio.wait([self.finding])

    async def _find_cuts(self) -> None:
        """Find where texts may be cut. No text differs afterwards if this fails."""
        try:
            self.cuts = await self.processes.find_cuts()
        except errors.Unavailable as error:
            log.warning("where texts may be cut is tried again with the next long one: %s", error.message)
            self.finding = None
            return
        except Exception:  # whatever it is, texts are encoded whole
            log.exception("the ids of chunks of long texts are not kept: the trials of where texts may be cut failed")
            return
        names = ", ".join(kind.name for kind in self.cuts.kinds) if self.cuts is not None else "none"
        log.info("long texts are cut at places of these kinds, where no text of %d differed: %s", NUM_TEXTS, names)

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
