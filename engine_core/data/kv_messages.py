"""Messages between the front and the core's KV thread, over a socket pair of their own.

They bypass the step loop, so calls are answered while a step runs. Leases, their blocks and generations belong to the
core; streams, peers and gRPC belong to the front.
"""

import msgspec


class KVTarget(msgspec.Struct, array_like=True, gc=False):
    """Describes where a reader finds the blocks of a lease that it acquired: the answer to Acquire, for the core."""

    acquisition_id: bytes
    transport: str
    """``cuda``, ``shm``, ``socket`` or ``nixl``."""
    endpoint: bytes
    """The owner's endpoint for that transport."""
    block_ids: list[int]
    """[n] blocks of the owner's pool, in token order from the first token. If layers of the model keep a state, behind
    them the slot with the state after the last token, as the owner's number of blocks plus its own."""
    generations: list[int]
    """[n] generations of those blocks."""
    num_tokens: int
    """Number of tokens whose KV the lease covers."""
    checksums: list[int] = []
    """[n] CRC-32 of each block over all regions, if enabled and the prefill was complete; otherwise empty."""
    owner: str = ""
    """The owner's incarnation, as in :class:`KVOwnersLeft`."""
    layout: str = ""
    """How the owner's pool is divided among its ranks (``kv_groups``); empty: it is that of one rank."""


# Front → KV thread: calls by other engines on leases held here. Each is answered by one KVAnswer with its call_id.


class KVAcquire(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Acquires a lease; a later acquisition supersedes an earlier one."""

    call_id: int
    lease_id: bytes
    kv_layout: str
    prompt_digest: bytes
    transports: list[str]
    """The reader's transports, best first."""
    is_own: bool = False
    """Whether this engine itself goes on from the KV: it needs no transport, and may serve none."""


class KVProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Asks for progress. Answered when more than ``tokens_seen`` tokens are ready, or the lease has ended."""

    call_id: int
    acquisition_id: bytes
    tokens_seen: int


class KVRenew(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Renews a lease."""

    call_id: int
    acquisition_id: bytes


class KVRelease(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Ends a lease after the copy, and asks whether its blocks stayed unchanged. Idempotent for 60 s."""

    call_id: int
    acquisition_id: bytes
    generations: list[int]


# Front → KV thread: news about loads of this engine's requests.


class KVRemoteProgress(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Reports how many tokens of a request's prompt the owner has ready to be read."""

    request_id: str
    tokens_ready: int


class KVVerdict(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Answers KVVerify. Also sent unasked (``valid`` False) when the owner is lost or the lease ended early."""

    request_id: str
    valid: bool
    reason: str = ""
    """One of ``LEASE_ENDS`` if not valid."""
    checksums: list[int] = []
    """Checksums of all blocks, if the owner computes them."""


class KVOwnersLeft(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Names incarnations of engines that left the registry and are read no more: what was opened to them is closed."""

    owners: list[str]


KVCall = KVAcquire | KVProgress | KVRenew | KVRelease | KVRemoteProgress | KVVerdict | KVOwnersLeft

# A reader that has to compute a prompt anew names why: the reasons are counted, and an operator sees whether leases end
# early, layouts differ or a network fails.
KV_FAILURES = (
    "lease_expired", "lease_revoked", "generation_changed", "checksum", "transport", "owner_lost", "layout", "digest",
    "not_found", "timeout", "weights",
)  # fmt: skip
"""Reasons of a local recompute: the label ``reason`` of ``tokenloom_kv_recompute_total``."""
REQUEST_ENDED = "request_ended"
"""Why a lease ended whose request ended before a hand-over: its first token was its last, or it was aborted. Its decode
leg waits for tokens that do not come and is aborted, so this is no failure, and nothing is computed again."""
LEASE_ENDS = (*KV_FAILURES, REQUEST_ENDED)
"""What an owner may answer about a lease that it does not have."""
ENDS_SOON = "it ends within a few tokens"
"""Why a running request is not lent that has hardly any tokens left: another engine would not save any."""


# KV thread → front.


class KVAnswer(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Answers the call with this id."""

    call_id: int
    failure: str = ""
    """Empty, or one of ``LEASE_ENDS``; ``detail`` explains it."""
    detail: str = ""
    target: KVTarget | None = None
    """For KVAcquire: where the blocks are."""
    ttl_seconds: float = 0.0
    """For KVAcquire and KVRenew: how long the lease lasts."""
    tokens_ready: int = 0
    """For KVProgress: how many tokens are ready."""
    num_tokens: int = 0
    """For KVProgress: the prefill is complete when ``tokens_ready`` reaches it."""
    valid: bool = False
    """For KVRelease: whether the blocks stayed unchanged."""
    checksums: list[int] = []
    """For KVRelease: checksums of the blocks, if enabled."""


class KVVerify(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Reports that a request's blocks were copied, or not (``copied`` False): the front releases the lease."""

    request_id: str
    copied: bool
    failure: str = ""
    """Why the copy failed: one of ``LEASE_ENDS``, or empty if the request does not want the blocks any more."""


KVEvent = KVAnswer | KVVerify
