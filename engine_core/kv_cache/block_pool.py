"""The pool of KV blocks: which are held, which are free, and which free ones can still be hit; and the hashes of a
request's blocks, by which they are found again."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenloom.request.prefix_schedule import block_hashes, hash_block, media_salt

from ..data.embedding_rows import block_salt
from ..data.kv_groups import NULL_BLOCK
from ..data.request import ParkedTokens, RequestKV, SessionReturn
from .kept_blocks import KeptBlocks

_ALWAYS_HELD = 1 << 62
MOVED = b"moved "
"""Begins the names of content that one preempted request looks for, and that goes to a ``ParkedStore`` when others need
its memory. No hash begins so, but for one of 2**48."""


class EvictionListener(Protocol):
    """Is notified when cached content is lost. Called from the thread that steps."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """A cached block gets a new holder, or may get one, which writes to it in the coming step at the earliest."""

    def forgot(self, block_hash: bytes) -> None:
        """This content is wrong: no copy of it may be used."""

    def forgot_all(self) -> None:
        """No cached content is valid any more."""


class ParkedStore(Protocol):
    """Keeps what preempted requests look for once the pools have given it up. Called from the thread that steps."""

    def chooses(self, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to keep the state and so many blocks of a request that is preempted, and would otherwise
        compute so many tokens again."""

    def has(self, parked: ParkedTokens) -> bool:
        """Return whether all of this content is in the pools or kept here."""

    def drop(self, parked: ParkedTokens) -> None:
        """Keep nothing of this content that only its request looks for."""


class BlockPool:
    """Counts the references to blocks, which are plain ids. A block without references is free.

    A registered block is found by the hash of its content until it gets a new holder.
    """

    def __init__(
        self, num_blocks: int, windows: Sequence[int | None] = (None,), *, has_null_block: bool = False
    ) -> None:
        """Make a pool of the ids in [0, num_blocks). With several groups, or with ``has_null_block``, ``NULL_BLOCK`` is
        never free. ``windows``: the window of each group; None: full attention."""
        first = 1 if len(windows) > 1 or has_null_block else 0
        self.windows = windows
        self.num_groups = len(windows)
        """How many blocks hold the KV of one block of tokens."""
        self.num_blocks = num_blocks - first
        """Blocks that requests can have."""
        self.num_free = self.num_blocks
        self.ref_counts = [0] * num_blocks
        if first:
            self.ref_counts[NULL_BLOCK] = _ALWAYS_HELD
        self.generations = [0] * num_blocks
        """[num_blocks] grows when a block gets a new holder: with an old generation its content is gone."""
        self.step = 0
        """The number of the step that is being planned. A connector that saves evicted blocks counts it; otherwise it
        stays 0."""
        self.registered_in = [0] * num_blocks
        """[num_blocks] the step in which a block was registered. Steps after it do not write to the block any more."""
        self.listeners: list[EvictionListener] = []
        self.wrong: set[int] = set()
        """Held blocks that were forgotten: their content, and what was computed from it, is not to be registered. They
        leave the set with their last holder."""
        self.parked: set[bytes] = set()
        """Names of content that one preempted request looks for, and no listener knows."""
        self.save_parked: Callable[[int, bytes], None] | None = None
        """Called in the place of listeners when such content is evicted."""
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._by_hash.get
        """Returns the block with this content, or None. Finding a block does not hold it."""
        # Free blocks: those without content are taken first, then cached ones, the longest free first. With sessions
        # they have the time since which they are free, and those that sessions used are kept apart.
        self._blank = list(range(num_blocks - 1, first - 1, -1))
        self._cached: OrderedDict[int, int | None] = OrderedDict()
        self._demoted: OrderedDict[int, int | None] = OrderedDict()  # taken before cached ones, the first demoted first
        self.kept = KeptBlocks()
        """The free cached blocks that turns of sessions have used."""

    @property
    def usage(self) -> float:
        """The share of the blocks that are held."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def num_blank(self) -> int:
        """Free blocks without content."""
        return len(self._blank)

    def content_of(self, block_id: int) -> bytes | None:
        """Return the hash under which a block is found; None: it is not."""
        return self._hashes[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, the least useful first. The caller has checked ``num_free``."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        self.num_free -= count
        block_ids = []
        for _ in range(count):
            # Blank blocks go first because a cached one may still save a prefill. They form a stack: the block that was
            # freed last is the one whose memory is most likely resident and in a cache.
            block_id = self._blank.pop() if self._blank else self._evict_oldest()
            self.ref_counts[block_id] = 1
            self.generations[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def count_free(self, block_ids: Iterable[int]) -> int:
        """Count which of these are free: sharing them reduces ``num_free``."""
        return list(map(self.ref_counts.__getitem__, block_ids)).count(0)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these blocks, which were found; ``release`` takes it back."""
        for block_id in block_ids:
            if not self.ref_counts[block_id]:
                try:
                    del self._cached[block_id]
                except KeyError:  # a turn of a session used it last, or it was demoted
                    self._remove(block_id)
                self.num_free -= 1
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block of a sequence. A block without references is free: its content can be hit
        until another request takes the block. The last block of the sequence will be taken first."""
        # From the tail, so that the end of a prompt is evicted before its beginning. A hit needs an unbroken chain from
        # the first block: a tail whose head is gone could never be found again.
        free_since = self.kept.now() if self.kept.is_used else None
        for block_id in reversed(block_ids):
            self.ref_counts[block_id] -= 1
            assert self.ref_counts[block_id] >= 0, f"block {block_id} is released twice"
            if not self.ref_counts[block_id]:
                self.num_free += 1
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                    self.wrong.discard(block_id)
                else:
                    self._cached[block_id] = free_since

    def release_turn(self, block_ids: Sequence[int], turn: SessionReturn) -> None:
        """Give up one reference to each block of a turn of a session, whose next turn is expected."""
        self.release(block_ids)
        # What is cached and free now was freed here: until then this turn held it.
        freed = [block_id for block_id in reversed(block_ids) if block_id in self._cached]
        for block_id in freed:
            del self._cached[block_id]
        self.kept.add(freed, turn)

    def demote(self, block_id: int) -> None:
        """Let a cached block, if it is free, be evicted before all that were not demoted."""
        if block_id in self._cached:
            self._demoted[block_id] = self._cached.pop(block_id)

    def oldest(self) -> int | None:
        """Return the cached block that is free for longest, of those that were not demoted."""
        return next(iter(self._cached), None)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Let a held block be found by its content.

        Returns False, and changes nothing, if another block already has this content.
        """
        # Equal blocks exist twice where none could be shared: a prompt's last token is always computed, and equal
        # requests may sample equal tokens. The first block keeps the name; the other is blank once its request ends.
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self.registered_in[block_id] = self.step
        return True

    def park(self, block_id: int, name: bytes, written_in: int) -> bytes:
        """Return the name of a held block: that of its content, or this new one if it has none. ``written_in``: the
        last step that may write to it."""
        if (content := self._hashes[block_id]) is not None:
            return content
        self.register(block_id, name)
        self.registered_in[block_id] = written_in
        self.parked.add(name)
        return name

    def unpark(self, block_ids: Iterable[int]) -> None:
        """Take the names of :meth:`park` off these held blocks, whose content may change from now on."""
        for block_id in block_ids:
            if (name := self._hashes[block_id]) in self.parked:
                assert name is not None, "it is in the set"
                self.parked.remove(name)
                del self._by_hash[name]
                self._hashes[block_id] = None

    def forget(self, block_ids: Iterable[int]) -> None:
        """Let these held blocks not be found any more, because their content is wrong."""
        for block_id in block_ids:
            block_hash = self._hashes[block_id]
            # A sharer that fills its next block registers all blocks before it anew, as if they had been evicted. A
            # block with NaN came back into the cache that way, hence the set of wrong blocks.
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hashes[block_id] = None
                self.wrong.add(block_id)
                self.kept.forget(block_id)
                for listener in self.listeners:
                    listener.forgot(block_hash)

    def forget_content(self, keys: Iterable[bytes]) -> None:
        """Let no block with this content be found any more, held or free, here or where a listener has saved it."""
        for key in keys:
            block_id = self._by_hash.pop(key, None)
            if block_id is not None:
                self._hashes[block_id] = None
                if self.ref_counts[block_id]:
                    self.wrong.add(block_id)
                else:
                    if self._cached.pop(block_id, self) is self:
                        self._remove(block_id)
                    self._blank.append(block_id)
                self.kept.forget(block_id)
            for listener in self.listeners:
                listener.forgot(key)

    def evict(self, block_hash: bytes, *, is_useless: bool = False) -> None:
        """Let the block with this content, if there is one, not be found any more although no other holder needs it:
        the content is right, and a listener may save it before the next step. ``is_useless``: it was parked, and its
        request does not look for it any more."""
        if (block_id := self._by_hash.pop(block_hash, None)) is None:
            return
        self._hashes[block_id] = None
        if not self.ref_counts[block_id]:
            if self._cached.pop(block_id, self) is self:
                self._remove(block_id)
            self._blank.append(block_id)
        self.kept.forget(block_id)
        if is_useless:
            self.parked.discard(block_hash)
        else:
            self._report_evicted(block_id, block_hash)

    def forget_all(self) -> None:
        """Let no block be found any more; held blocks stay held."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
        self._by_hash.clear()
        self.parked.clear()
        # Held blocks are not marked wrong: after a lost step or new weights their owners lose them or compute them
        # again.
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        self._blank.extend(reversed(self._demoted))
        self._demoted.clear()
        self._blank.extend(self.kept.clear())
        for listener in self.listeners:
            listener.forgot_all()

    def _remove(self, block_id: int) -> None:
        """Take a block off the free ones that are not in ``_cached``."""
        if self._demoted.pop(block_id, self) is self:
            self.kept.remove(block_id)

    def _evict_oldest(self) -> int:
        if self._demoted:
            block_id, _ = self._demoted.popitem(last=False)
            self.kept.forget(block_id)
        elif self.kept.is_used:
            block_id = self.kept.evict(self._cached)
        else:
            block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block_id]
        assert block_hash is not None, "a free block without content is blank"
        del self._by_hash[block_hash]
        self._hashes[block_id] = None
        self._report_evicted(block_id, block_hash)
        return block_id

    def _report_evicted(self, block_id: int, block_hash: bytes) -> None:
        if self.parked and block_hash in self.parked:
            self.parked.remove(block_hash)
            if self.save_parked is not None:
                self.save_parked(block_id, block_hash)
            return
        for listener in self.listeners:
            listener.evicted(block_id, block_hash)


def hash_next_block(request: RequestKV, block_size: int, seed: bytes) -> None:
    """Append the hash of the first full block of a request that has none yet. ``seed``: the root of the chain.

    Embeddings and images salt only the blocks that hold them; the chain carries them into all later blocks.
    """
    hashes = request.block_hashes
    start = len(hashes) * block_size
    end = start + block_size
    salt = request.cache_salt
    if request.prompt_embeds:
        salt = block_salt(salt, request.prompt_embeds, start, end)
    if request.media:
        salt = media_salt(salt, request.media, start, end)
    hashes.append(hash_block(hashes[-1] if hashes else seed, request.all_token_ids[start:end], salt))


_HASHED_ALONE = 16
"""So many blocks of a request are hashed one by one: its prompt may be found nowhere."""
_HASHED_AT_ONCE = 512
"""At most so many are hashed in a row, in 0.4 ms."""


class RequestHasher:
    """Computes the block hashes of requests. One that begins as the request before it takes over the hashes of what
    they share: comparing the tokens of a block takes a fifth of the time of its hash."""

    def __init__(self, block_size: int, seed: bytes) -> None:
        """``seed``: the root of all chains."""
        self._block_size = block_size
        self._seed = seed
        self._last: RequestKV | None = None

    def add_next(self, request: RequestKV) -> None:
        """Append the hash of the first full block of a request that has none yet, and of others: if they are known, or
        if many blocks have one already."""
        hashes, size = request.block_hashes, self._block_size
        # Rows of embeddings and keys of images would have to be compared as well, and a request that has a hash already
        # knows where it differs.
        if hashes or request.prompt_embeds or request.media:
            num_hashes = len(hashes)
            is_alone = num_hashes < _HASHED_ALONE or len(request.all_token_ids) < (num_hashes + 2) * size
            if is_alone or request.prompt_embeds or request.media:
                hash_next_block(request, size, self._seed)
                return
            # Together they take half of the time, and a prompt that was found so far, or is computed, needs them all.
            end = num_hashes + min(num_hashes, _HASHED_AT_ONCE)
            ids = request.all_token_ids[num_hashes * size : end * size]
            hashes += block_hashes(ids, size, hashes[-1], request.cache_salt)
            return
        # Of 32 prompts that arrive together and share 512 tokens, hashing took two thirds of the first step's planning.
        last, self._last = self._last, request
        if last is not None and last is not request and last.cache_salt == request.cache_salt:
            ours, theirs = request.all_token_ids, last.all_token_ids
            for start, block_hash in zip(range(0, len(ours) - size + 1, size), last.block_hashes, strict=False):
                if ours[start : start + size] != theirs[start : start + size]:
                    break
                hashes.append(block_hash)
        if not hashes:
            hash_next_block(request, size, self._seed)
