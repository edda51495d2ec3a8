"""Leases: promises of the owner of KV blocks that they stay as they are until a reader has copied them."""

import hashlib
import math
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .kv_transport import KVTransferError

PATIENCE_SHARE = 1 / 6
"""Of a lease's time: how long it is safe from requests that could wait for its blocks (5 of 30 seconds)."""
ANSWER_SECONDS = 60.0
"""How long it is remembered how a lease ended."""
_MAX_ENDED = 65_536
"""Ended leases and acquisitions remembered at most: a thousand a second."""


def prompt_digest(token_ids: Sequence[int], salt: bytes) -> bytes:
    """SHA-256 over the salt's length (u32), the salt, and the ids, little-endian u32: owner and reader compare it, so
    that a lease can never be read for another prompt or by another tenant."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.sha256(struct.pack("<I", len(salt)) + salt + packed).digest()


@dataclass(slots=True)
class Lease:
    """One of them, while it lasts."""

    lease_id: bytes
    request_id: str
    """Of the prefill."""
    block_ids: list[int]
    """In token order; the last may be filled in part."""
    generations: list[int]
    num_tokens: int
    """Covered by the blocks."""
    digest: bytes
    tokens_ready: int = 0
    acquisition_id: bytes = b""
    """Of the newest reader; empty: none yet."""
    kept_at: float | None = None
    """When the prefill was done; None: its blocks are its own until then."""
    expires_at: float = math.inf


class LeaseTable:
    """All leases of an engine. The thread that steps grants, publishes, keeps and drops; the KV thread does the rest.

    A lease ends once: released, expired, dropped or revoked. How it ended is remembered for whoever asks later.
    """

    def __init__(
        self,
        seconds: float,
        generations: Sequence[int] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], bytes] = lambda: os.urandom(16),
    ) -> None:
        """``generations``: of every block of the pool, as it is now: read, never written."""
        self.generations = generations
        self._seconds = seconds
        self._clock = clock
        self._new_id = new_id
        self._lock = threading.Lock()
        self._leases: dict[bytes, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._by_acquisition: dict[bytes, Lease] = {}
        self._kept: OrderedDict[str, Lease] = OrderedDict()  # oldest first
        self._ended: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # lease and acquisition ids; "": released
        self._freed: list[str] = []
        self._is_room_wanted = False

    def __len__(self) -> int:
        return len(self._leases)

    # For the thread that steps

    def grant(self, lease_id: bytes, request_id: str, block_ids: Sequence[int], num_tokens: int, digest: bytes) -> None:
        """Promises blocks to whoever shows the id and the digest; an earlier grant to the same request is void."""
        generations = [self.generations[block_id] for block_id in block_ids]
        with self._lock:
            if (earlier := self._by_request.get(request_id)) is not None:
                self._end(earlier, "lease_revoked")
            lease = Lease(lease_id, request_id, list(block_ids), generations, num_tokens, digest)
            self._leases[lease_id] = self._by_request[request_id] = lease

    def publish(self, request_id: str, tokens_ready: int) -> None:
        """So many tokens are computed and written, for good."""
        with self._lock:
            if (lease := self._by_request.get(request_id)) is not None:
                lease.tokens_ready = min(tokens_ready, lease.num_tokens)

    def keep(self, request_id: str) -> bool:
        """The prefill is done: the lease's time begins, and its blocks outlive the request. False: it has ended."""
        with self._lock:
            if (lease := self._by_request.get(request_id)) is None:
                return False
            lease.kept_at = self._clock()
            lease.expires_at = lease.kept_at + self._seconds
            self._kept[request_id] = lease
            return True

    def drop(self, request_id: str) -> None:
        """The request ended in another way, or lost its blocks: so does its lease."""
        with self._lock:
            if (lease := self._by_request.get(request_id)) is not None:
                self._end(lease, "lease_revoked")

    def drop_unacquired(self, request_id: str) -> None:
        """Nobody will come for the KV of this finished prefill; who came already may go on reading."""
        with self._lock:
            lease = self._kept.get(request_id)
            if lease is not None and not lease.acquisition_id:
                self._end(lease, "lease_revoked", freed=True)

    def revoke_oldest(self) -> str | None:
        """Ends the lease that is kept for longest; its request, whose blocks are the caller's now."""
        with self._lock:
            if not self._kept:
                return None
            request_id, lease = next(iter(self._kept.items()))
            self._end(lease, "lease_revoked")
            return request_id

    def want_room(self) -> None:
        """A request could use the blocks of the oldest lease, and can wait: nothing else runs. Until any lease ends."""
        self._is_room_wanted = True

    def take_freed(self) -> set[str]:
        """Finished requests whose leases ended otherwise since the last call: their blocks may be freed."""
        with self._lock:
            freed, self._freed = self._freed, []
        return set(freed)

    def any_freed(self) -> bool:
        """Whether ``take_freed`` would return any."""
        return bool(self._freed)

    # For the KV thread; all raise KVTransferError when the lease has ended or never was

    def acquire(self, lease_id: bytes, digest: bytes) -> tuple[Lease, float]:
        """A copy of the lease under a new acquisition id, and its seconds to live. Supersedes earlier readers."""
        with self._lock:
            lease = self._find(self._leases, lease_id)
            if lease.digest != digest:
                raise KVTransferError("digest", "the lease is for another prompt")
            self._forget_reader(lease)
            lease.acquisition_id = self._new_id()
            self._by_acquisition[lease.acquisition_id] = lease
            copy = Lease(
                lease.lease_id, lease.request_id, list(lease.block_ids), list(lease.generations), lease.num_tokens,
                lease.digest, lease.tokens_ready, lease.acquisition_id,
            )  # fmt: skip
            return copy, self._extend(lease)

    def progress(self, acquisition_id: bytes) -> tuple[int, int]:
        """Tokens ready, and of how many."""
        with self._lock:
            lease = self._find(self._by_acquisition, acquisition_id)
            return lease.tokens_ready, lease.num_tokens

    def renew(self, acquisition_id: bytes) -> float:
        """Seconds to live, as many as at first."""
        with self._lock:
            return self._extend(self._find(self._by_acquisition, acquisition_id))

    def blocks_of(self, acquisition_id: bytes) -> list[int]:
        """In token order."""
        with self._lock:
            return list(self._find(self._by_acquisition, acquisition_id).block_ids)

    def release(self, acquisition_id: bytes, generations: Sequence[int]) -> None:
        """Ends the lease, after the copy. Raises too when a block was not the same, or not ready, all the while; the
        answer to an acquisition that was released stays the same."""
        with self._lock:
            if (ended := self._ended.get(acquisition_id)) is not None and not ended[0]:
                return
            lease = self._find(self._by_acquisition, acquisition_id)
            now = [self.generations[block_id] for block_id in lease.block_ids]
            valid = list(generations) == lease.generations == now and lease.tokens_ready == lease.num_tokens
            self._end(lease, "" if valid else "generation_changed", freed=True)
            if not valid:
                raise KVTransferError("generation_changed", "blocks were given to somebody else during the copy")

    def expire(self) -> float | None:
        """Ends leases whose time is up, or whose blocks are wanted; seconds until more may, None without any."""
        with self._lock:
            now = self._clock()
            for lease in [lease for lease in self._kept.values() if lease.expires_at <= now]:
                self._end(lease, "lease_expired", freed=True)
            if self._kept and self._is_room_wanted and self._safe_until() <= now:
                self._end(next(iter(self._kept.values())), "lease_revoked", freed=True)
            if not self._kept:
                return None
            soonest = min(lease.expires_at for lease in self._kept.values())
            return max(0.0, min(soonest, self._safe_until()) - now)

    def end_early(self, acquisition_id: bytes) -> None:
        """As if its time had run out."""
        with self._lock:
            self._end(self._find(self._by_acquisition, acquisition_id), "lease_expired", freed=True)

    # With the lock held

    def _find(self, leases: dict[bytes, Lease], key: bytes) -> Lease:
        if (lease := leases.get(key)) is not None:
            return lease
        reason = self._ended[key][0] if key in self._ended else ""
        raise KVTransferError(reason or "not_found", "the lease has ended" if key in self._ended else "no such lease")

    def _safe_until(self) -> float:
        """When the oldest lease may go, if its blocks are wanted."""
        kept_at = next(iter(self._kept.values())).kept_at
        assert kept_at is not None
        return kept_at + self._seconds * PATIENCE_SHARE if self._is_room_wanted else math.inf

    def _extend(self, lease: Lease) -> float:
        if lease.kept_at is not None:
            lease.expires_at = self._clock() + self._seconds
        return self._seconds

    def _forget_reader(self, lease: Lease) -> None:
        if lease.acquisition_id:
            del self._by_acquisition[lease.acquisition_id]
            self._remember(lease.acquisition_id, "not_found")

    def _end(self, lease: Lease, reason: str, *, freed: bool = False) -> None:
        """``freed``: whoever holds the blocks of a finished prefill is to hear of it."""
        del self._leases[lease.lease_id]
        del self._by_request[lease.request_id]
        if self._kept.pop(lease.request_id, None) is not None and freed:
            self._freed.append(lease.request_id)
            self._is_room_wanted = False
        self._remember(lease.lease_id, reason)
        if lease.acquisition_id:
            del self._by_acquisition[lease.acquisition_id]
            self._remember(lease.acquisition_id, reason)

    def _remember(self, key: bytes, reason: str) -> None:
        now = self._clock()
        while self._ended and (len(self._ended) >= _MAX_ENDED or next(iter(self._ended.values()))[1] <= now):
            self._ended.popitem(last=False)
        self._ended[key] = (reason, now + ANSWER_SECONDS)
