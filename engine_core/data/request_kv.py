"""Holds what the KV cache and its connectors know of a request: its tokens, its blocks and its KV on other engines."""

from collections.abc import Sequence

from tokenloom.request.routed_rows import RoutedRows

from .embedding_rows import EmbedsSpan
from .kv_messages import KVTarget
from .request_status import RequestStatus


class RemoteKVState:
    """Holds what a request exchanges with other engines; most requests have none."""

    __slots__ = (
        "awaits_tokens",
        "failure",
        "hits_lost",
        "is_waiting",
        "lease_id",
        "num_external_tokens",
        "resume_status",
        "target",
        "wait_ns",
        "waiting_since_ns",
    )

    def __init__(self, lease_id: bytes = b"", target: KVTarget | None = None, *, awaits_tokens: bool = False) -> None:
        self.lease_id = lease_id
        """Prefill leg: the lease under which its KV is offered."""
        self.target = target
        """Decode leg: where its KV is, until it is loaded or no longer needed."""
        self.awaits_tokens = awaits_tokens
        self.num_external_tokens = 0
        """Tokens after the local hits that are being loaded, or were."""
        self.failure = ""
        """Why some could not be loaded: one of ``KV_FAILURES``."""
        self.hits_lost = False
        """Whether the local hits became invalid meanwhile."""
        self.is_waiting = False
        """Whether the request waits for blocks or tokens of another engine now."""
        self.resume_status = RequestStatus.WAITING
        """The status to return to after waiting."""
        self.waiting_since_ns = 0
        self.wait_ns = 0


# A record of its own, so that the KV cache, its connectors and their tests need nothing that schedules requests.
class RequestKV:
    """Holds the KV of one request. The KV cache manager maintains the blocks and their hashes."""

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "first_kept_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_cached_tokens",
        "num_registered_blocks",
        "prompt_embeds",
        "remote",
        "request_id",
        "reserved_block_ids",
        "routed_rows",
        "skip_reading_prefix_cache",
    )

    def __init__(
        self,
        request_id: str,
        all_token_ids: list[int],
        cache_salt: bytes = b"",
        prompt_embeds: list[EmbedsSpan] | None = None,
        remote: RemoteKVState | None = None,
        routed_rows: RoutedRows | None = None,
    ) -> None:
        """``all_token_ids``: the request's own list, which grows with its output. ``routed_rows``: None if the request
        does not ask for experts."""
        self.request_id = request_id
        self.all_token_ids = all_token_ids
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds or []
        self.remote = remote
        self.routed_rows = routed_rows
        self.skip_reading_prefix_cache = False
        self.num_computed_tokens = 0
        """Counted when they are scheduled."""
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.first_kept_blocks: Sequence[int] = ()
        """For each KV group the first block of tokens that it still keeps; empty without groups."""
        self.reserved_block_ids: list[int] = []
        """Entries that will follow those of ``block_ids``, chosen early because another engine will read them."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV was found when the request was first scheduled."""
        self.num_external_cached_tokens = 0
        """The part of them that came from another engine or tier."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.all_token_ids)

    @property
    def is_decode_leg(self) -> bool:
        """Whether its KV, or its first tokens, will come from another engine."""
        return self.remote is not None and (self.remote.target is not None or self.remote.awaits_tokens)

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens that may come from a prefix cache: not the last one, whose logits are the next token, and none whose
        experts are still to be returned."""
        most = len(self.all_token_ids) - 1
        return most if self.routed_rows is None else min(most, self.routed_rows.end)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds spent waiting for the KV of another engine."""
        return self.remote.wait_ns if self.remote is not None else 0
