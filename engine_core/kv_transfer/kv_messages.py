"""What the front and the KV thread of the core say to each other, over a socket pair of their own.

Never through the step loop: calls are answered while a step runs. Leases, their blocks and generations belong to the
core; streams, peers and gRPC belong to the front.
"""

import msgspec


class KVTarget(msgspec.Struct, array_like=True, gc=False):
    """Where a reader finds the blocks of a lease that it acquired: the answer to Acquire, fit for the core."""

    acquisition_id: bytes
    transport: str
    """``shm``, ``socket`` or ``nixl``."""
    endpoint: bytes
    """Of that transport."""
    block_ids: list[int]
    """[n] of the owner's pool, in token order from the first token."""
    generations: list[int]
    """[n]"""
    num_tokens: int
    """Tokens whose KV the lease covers."""
    checksums: list[int] = []
    """[n] CRC-32 of each block over all regions, when enabled and the prefill was complete; else empty."""


# Front → KV thread: calls of readers elsewhere on leases held here. Each is answered by one KVAnswer of its call_id.


class KVAcquire(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Takes up a lease; a later one supersedes it."""

    call_id: int
    lease_id: bytes
    kv_layout: str
    prompt_digest: bytes
    transports: list[str]
    """The reader's, best first."""


class KVProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Answered when more than ``tokens_seen`` tokens are ready, or the lease ended."""

    call_id: int
    acquisition_id: bytes
    tokens_seen: int


class KVRenew(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Keeps a lease alive."""

    call_id: int
    acquisition_id: bytes


class KVRelease(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Asked after the copy: were they the same blocks all the while? Ends the lease; idempotent for 60 s."""

    call_id: int
    acquisition_id: bytes
    generations: list[int]


# Front → KV thread: about loads of this engine's own requests.


class KVRemoteProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The owner says so many tokens of this request's prompt are ready to be read."""

    request_id: str
    tokens_ready: int


class KVVerdict(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The answer to KVVerify; also sent unasked (``valid`` False) when the owner is gone or the lease ended early."""

    request_id: str
    valid: bool
    reason: str = ""
    """One of ``KV_FAILURES`` when not valid."""
    checksums: list[int] = []
    """Of all blocks, when the owner computes them."""


KVCall = KVAcquire | KVProgress | KVRenew | KVRelease | KVRemoteProgress | KVVerdict

KV_FAILURES = (
    "lease_expired", "lease_revoked", "generation_changed", "checksum", "transport", "owner_lost", "layout", "digest",
    "not_found", "timeout",
)  # fmt: skip
"""Reasons of a local recompute: label ``reason`` of ``tokenloom_kv_recompute_total``."""


# KV thread → front.


class KVAnswer(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Answers the call of that id."""

    call_id: int
    failure: str = ""
    """Empty, or one of ``KV_FAILURES``; ``detail`` names the difference."""
    detail: str = ""
    target: KVTarget | None = None
    """Of KVAcquire."""
    ttl_seconds: float = 0.0
    """Of KVAcquire and KVRenew."""
    tokens_ready: int = 0
    """Of KVProgress."""
    num_tokens: int = 0
    """Of KVProgress: complete when ``tokens_ready`` reaches it."""
    valid: bool = False
    """Of KVRelease."""
    checksums: list[int] = []
    """Of KVRelease, when enabled."""


class KVVerify(msgspec.Struct, tag=True, array_like=True, gc=False):
    """The copy of this request's blocks is done (or given up, ``copied`` False): the front is to release the lease."""

    request_id: str
    copied: bool
    failure: str = ""
    """Why it was given up: one of ``KV_FAILURES``, or empty where the request is not wanted any more."""


KVEvent = KVAnswer | KVVerify
