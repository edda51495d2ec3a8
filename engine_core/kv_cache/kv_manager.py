"""Says what a scheduler asks of the memory of requests, and chooses the manager that suits a model."""

from typing import Protocol

from ..data.config import CacheConfig, SchedulerConfig
from ..data.kv_events import KVEventLog
from ..data.kv_groups import KVCacheConfig
from ..data.request import RequestKV, SessionReturn
from .block_pool import BlockPool
from .grouped_kv_cache_manager import GroupedKVCacheManager
from .kv_cache_manager import CrossKVCacheManager, KVCacheManager
from .state_kv_cache_manager import StateKVCacheManager
from .state_slots import StateSlotPool


class KVManager(Protocol):
    """Gives requests memory for their tokens. :class:`.KVCacheManager` says more of each method."""

    pool: BlockPool
    block_size: int
    num_groups: int
    enable_prefix_caching: bool
    num_slots: int
    """Tokens of the longest request that the empty pool has room for."""
    keeps_partial_loads: bool
    """Whether the blocks that a load filled before it failed can be used."""

    @property
    def states(self) -> StateSlotPool | None:
        """Slots of layers that keep a state, beside the blocks; None: no layer does."""

    def find_cached_blocks(self, request: RequestKV) -> list[int]:
        """Return the block table of the longest cached prefix of a waiting request."""

    def finds_more(self, request: RequestKV, num_hits: int) -> bool:
        """Return whether a waiting request would find a longer table than one of ``num_hits`` entries."""

    def num_hit_tokens(self, hits: list[int], request: RequestKV | None = None) -> int:
        """Return how many tokens the blocks of a table hold that was found for a request."""

    def lacks_cross(self, request: RequestKV) -> bool:
        """Return whether the keys and values of the rows beside a waiting request's prompt have to be written."""

    def can_admit(
        self, request: RequestKV, hits: list[int], num_tokens: int, num_spare: int, num_external_tokens: int = 0
    ) -> bool:
        """Return whether ``num_tokens`` tokens of a waiting request fit and leave ``num_spare`` blocks free."""

    def admit(self, request: RequestKV, hits: list[int]) -> None:
        """Start the block table of a request with what it shares."""

    def reserve(self, request: RequestKV) -> list[int]:
        """Choose the blocks of an admitted request that another engine will read, and the slot. Returns its table of
        these."""

    def lend(self, request: RequestKV, num_tokens: int) -> list[int] | None:
        """Do the same for the first ``num_tokens`` tokens of a running request, more than it has. None: there is no
        room. The worker learns of the new blocks as of others, when steps fill them."""

    def end_lending(self, request: RequestKV) -> None:
        """Note that no other engine goes on with a running request. Blocks that were chosen stay its next ones."""

    def reserve_load(self, request: RequestKV, num_external_tokens: int) -> None:
        """Allocate the blocks that an admitted request loads after its hits."""

    def load_table(self, request: RequestKV, num_tokens: int) -> list[int]:
        """Return where a request that loads its first ``num_tokens`` tokens has them: its blocks, and behind them its
        slot."""

    def finish_load(self, request: RequestKV, num_tokens: int) -> None:
        """Count the first ``num_tokens`` tokens, which were loaded, as computed."""

    def allocate(self, request: RequestKV, num_new_tokens: int) -> list[int] | None:
        """Make room for a request's next tokens. Returns the blocks added, or None if there is no room."""

    def extend(self, request: RequestKV, num_scheduled: int, count: int) -> list[int] | None:
        """Make room for tokens after those of the step. Returns the blocks added, or None if there is no room."""

    def cache_accepted(self, request: RequestKV) -> None:
        """Let full blocks be hit whose last tokens were drafts when they were computed, and are accepted now."""

    def forget(self, request: RequestKV) -> None:
        """Let nothing be hit that a request computed or shared."""

    def park(self, request: RequestKV) -> None:
        """Let a request that is about to be preempted find what it has computed, until others need the memory. Does
        nothing where any prompt with its tokens finds it."""

    def free(self, request: RequestKV, turn: SessionReturn | None = None) -> None:
        """Take all memory of a request back."""


def make_kv_manager(
    kv_cache: KVCacheConfig, cache: CacheConfig, scheduler: SchedulerConfig, events: KVEventLog | None, *, lends: bool
) -> KVManager:
    """Return the manager of an empty pool. ``events`` records which blocks can be hit, if given. ``lends``: whether
    other engines may read blocks."""
    if kv_cache.cross_blocks:
        return CrossKVCacheManager(kv_cache, cache, events)
    if kv_cache.num_state_slots:
        return StateKVCacheManager(kv_cache, cache, events)
    if not kv_cache.groups:
        return KVCacheManager(kv_cache.num_blocks, cache, events, has_null_block=kv_cache.has_null_block)
    return GroupedKVCacheManager(
        kv_cache.num_blocks, kv_cache.groups, cache, largest_chunk(scheduler), events, lends=lends
    )


def largest_chunk(scheduler: SchedulerConfig) -> int:
    """Return most tokens that one request computes in a step."""
    return scheduler.long_prefill_token_threshold or scheduler.max_num_batched_tokens
