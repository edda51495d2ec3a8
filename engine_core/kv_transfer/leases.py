"""Leases: an owner of KV blocks promises that they stay unchanged until a reader has copied them."""

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

# A crowded prefill engine should not discard blocks that readers are about to copy, and two engines whose requests wait
# for each other's leases must not wait for ever.
PATIENCE_SHARE = 1 / 6
"""Share of a lease's time in which requests that could use its blocks have to wait (5 of 30 seconds)."""
ANSWER_SECONDS = 60.0
"""How long the reason for the end of a lease is kept."""
_MAX_ENDED = 65_536
"""Limit of ended leases and acquisitions whose reasons are kept: about a thousand per second."""


def random_id() -> bytes:
    """Return the id of an acquisition, which no other has."""
    return os.urandom(16)


def prompt_digest(token_ids: Sequence[int], salt: bytes) -> bytes:
    """Return SHA-256 over the salt's length (u32), the salt, and the ids (little-endian u32). Owner and reader compare
    it, so a lease can never be read for another prompt or by another tenant."""
    # The length of the salt comes first, or a byte could move between salt and tokens without changing the digest.
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.sha256(struct.pack("<I", len(salt)) + salt + packed).digest()


@dataclass(slots=True)
class Lease:
    """Describes a lease while it lasts."""

    lease_id: bytes
    request_id: str
    """The request of the prefill."""
    block_ids: list[int]
    """Blocks in token order; the last one may be filled partly."""
    generations: list[int]
    num_tokens: int
    """Number of tokens that the blocks cover."""
    digest: bytes
    tokens_ready: int = 0
    acquisition_id: bytes = b""
    """The acquisition of the latest reader; empty before the first."""
    compares: bool = True
    """Whether that reader's copy is compared with checksums."""
    kept_at: float | None = None
    """When the prefill was complete; None before, while the request itself holds the blocks."""
    expires_at: float = math.inf


class LeaseTable:
    """Owns all leases of an engine. The thread that steps grants, publishes, keeps and drops them; the KV thread does
    the rest.

    A lease ends once: released, expired, dropped or revoked. The reason is kept for later calls.
    """

    def __init__(
        self,
        seconds: float,
        generations: Sequence[int] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], bytes] = random_id,
    ) -> None:
        """``generations``: the present generation of every block of the pool; read, never written."""
        self.generations = generations
        self._seconds = seconds
        self._clock = clock
        self._new_id = new_id
        self._lock = threading.Lock()
        self._leases: dict[bytes, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._by_acquisition: dict[bytes, Lease] = {}
        self._kept: OrderedDict[str, Lease] = OrderedDict()  # oldest first
        self._ended: OrderedDict[bytes, tuple[str, float]] = (
            OrderedDict()
        )  # by lease and acquisition id: reason (empty if released), expiry
        self._freed: list[str] = []
        self._is_room_wanted = False

    def __len__(self) -> int:
        return len(self._leases)

    # For the thread that steps

    def grant(
        self, lease_id: bytes, request_id: str, block_ids: Sequence[int], num_tokens: int, digest: bytes
    ) -> Lease:
        """Grant a lease to a reader that presents the id and the digest. An earlier lease of the request ends."""
        generations = [self.generations[block_id] for block_id in block_ids]
        with self._lock:
            if (earlier := self._by_request.get(request_id)) is not None:
                self._end(earlier, "lease_revoked")
            lease = Lease(lease_id, request_id, list(block_ids), generations, num_tokens, digest)
            self._leases[lease_id] = self._by_request[request_id] = lease
        return lease

    def publish(self, lease: Lease, tokens_ready: int) -> None:
        """Note that ``tokens_ready`` tokens are computed and will not change. Has no effect if the lease has ended,
        even if its request has another one by now."""
        with self._lock:
            lease.tokens_ready = min(tokens_ready, lease.num_tokens)

    def keep(self, request_id: str) -> bool:
        """Start the lease's time, because the prefill is complete. Returns False if the lease has ended."""
        with self._lock:
            if (lease := self._by_request.get(request_id)) is None:
                return False
            lease.kept_at = self._clock()
            lease.expires_at = lease.kept_at + self._seconds
            self._kept[request_id] = lease
            return True

    def drop(self, request_id: str, reason: str = "lease_revoked") -> None:
        """End the lease of a request that ended otherwise or lost its blocks. ``reason``: one of ``LEASE_ENDS``."""
        with self._lock:
            if (lease := self._by_request.get(request_id)) is not None:
                self._end(lease, reason)

    def drop_unacquired(self, request_id: str) -> None:
        """End the lease of a finished prefill unless a reader has acquired it; that reader may continue."""
        with self._lock:
            lease = self._kept.get(request_id)
            if lease is not None and not lease.acquisition_id:
                self._end(lease, "lease_revoked", freed=True)

    def revoke_oldest(self) -> str | None:
        """End the lease that has been kept longest. Returns its request, whose blocks the caller now owns."""
        with self._lock:
            if not self._kept:
                return None
            request_id, lease = next(iter(self._kept.items()))
            self._end(lease, "lease_revoked")
            return request_id

    def shorten_oldest_lease(self) -> None:
        """Note that a request waits for the oldest lease's blocks while nothing runs. Reset when a lease ends."""
        self._is_room_wanted = True

    def take_freed(self) -> set[str]:
        """Return finished requests whose leases have ended since the last call, so that their blocks can be freed."""
        with self._lock:
            freed, self._freed = self._freed, []
        return set(freed)

    def any_freed(self) -> bool:
        """Return whether ``take_freed`` would return any."""
        return bool(self._freed)

    # For the KV thread. All methods raise KVTransferError if the lease has ended or never existed.

    def acquire(self, lease_id: bytes, digest: bytes, *, compares: bool = True) -> tuple[Lease, float]:
        """Return a copy of the lease with a new acquisition id, and its seconds to live. Supersedes earlier readers.
        ``compares``: whether the reader's copy is to be compared with checksums."""
        with self._lock:
            lease = self._find(self._leases, lease_id)
            if lease.digest != digest:
                raise KVTransferError("digest", "the lease is for another prompt")
            # A reader that asks again has lost its first answer, or its output processor has. The former acquisition
            # must not renew or release the lease under the new one.
            self._forget_reader(lease)
            lease.acquisition_id = self._new_id()
            lease.compares = compares
            self._by_acquisition[lease.acquisition_id] = lease
            # A copy, because the thread that steps publishes tokens in the lease while the KV thread makes an answer of
            # it.
            copy = Lease(
                lease.lease_id, lease.request_id, list(lease.block_ids), list(lease.generations), lease.num_tokens,
                lease.digest, lease.tokens_ready, lease.acquisition_id,
            )  # fmt: skip
            return copy, self._extend(lease)

    def progress(self, acquisition_id: bytes) -> tuple[int, int]:
        """Return the tokens that are ready, and the tokens that the lease covers."""
        with self._lock:
            lease = self._find(self._by_acquisition, acquisition_id)
            return lease.tokens_ready, lease.num_tokens

    def renew(self, acquisition_id: bytes) -> float:
        """Extend the lease and return its seconds to live."""
        with self._lock:
            return self._extend(self._find(self._by_acquisition, acquisition_id))

    def blocks_to_compare(self, acquisition_id: bytes) -> list[int]:
        """Return the blocks in token order whose checksums the reader is to get; empty: it gets none."""
        with self._lock:
            lease = self._find(self._by_acquisition, acquisition_id)
            return list(lease.block_ids) if lease.compares else []

    def release(self, acquisition_id: bytes, generations: Sequence[int]) -> None:
        """End the lease after the copy. Raises also if a block changed or was not ready during the copy. Idempotent for
        an acquisition that was released."""
        with self._lock:
            # The answer to a Release may be lost on its way, and its repetition must not tell the reader that its KV is
            # useless.
            if (ended := self._ended.get(acquisition_id)) is not None and not ended[0]:
                return
            lease = self._find(self._by_acquisition, acquisition_id)
            now = [self.generations[block_id] for block_id in lease.block_ids]
            # Three views have to agree: what the reader was given, what the lease granted, and what the pool holds now.
            # The ready tokens catch a reader that copied ahead of the prefill.
            valid = list(generations) == lease.generations == now and lease.tokens_ready == lease.num_tokens
            self._end(lease, "" if valid else "generation_changed", freed=True)
            if not valid:
                raise KVTransferError("generation_changed", "blocks were reused during the copy")

    def expire(self) -> float | None:
        """End leases that expired or whose blocks are wanted. Returns the seconds until the next end, or None."""
        with self._lock:
            now = self._clock()
            for lease in [lease for lease in self._kept.values() if lease.expires_at <= now]:
                self._end(lease, "lease_expired", freed=True)
            # One lease at a time: its blocks may already be enough, and each lease taken back costs another engine a
            # prefill.
            if self._kept and self._is_room_wanted and self._safe_until() <= now:
                self._end(next(iter(self._kept.values())), "lease_revoked", freed=True)
            if not self._kept:
                return None
            soonest = min(lease.expires_at for lease in self._kept.values())
            return max(0.0, min(soonest, self._safe_until()) - now)

    def end_early(self, acquisition_id: bytes) -> None:
        """End a lease as if it had expired."""
        with self._lock:
            self._end(self._find(self._by_acquisition, acquisition_id), "lease_expired", freed=True)

    # With the lock held

    def _find(self, leases: dict[bytes, Lease], key: bytes) -> Lease:
        if (lease := leases.get(key)) is not None:
            return lease
        reason = self._ended[key][0] if key in self._ended else ""
        raise KVTransferError(reason or "not_found", "the lease has ended" if key in self._ended else "no such lease")

    def _safe_until(self) -> float:
        """Return when the oldest lease may be revoked, if its blocks are wanted."""
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
        """``freed``: report a finished prefill in ``take_freed``, so that its blocks are freed."""
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
