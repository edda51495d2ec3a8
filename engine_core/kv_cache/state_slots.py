"""Gives requests slots for the states of layers that keep one, and says which slots each step reads and writes.

A slot holds the states of all layers after some number of tokens. A request owns one, which its steps change in place,
unless it can be hit: then the step reads it and writes another one. So what is kept of a prompt, what a request begins
with and what several requests share costs no copy. A kept state is found by the hash of the KV block that ends with its
last token, and goes with that block.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from math import lcm
from typing import NamedTuple

from ..data.config import CacheConfig
from ..data.kv_events import StateEvents
from ..data.kv_groups import KVCacheConfig
from ..data.request import RequestKV, RequestState
from ..data.scheduler_output import StateRun
from .block_pool import BlockPool, ParkedStore

# Two prompts that share less than this, a system prompt for example, save less than the place of a state is worth.
FORK_TOKENS = 1024
"""A request that finds KV for so many more tokens than states keeps a state where its prompt parts from the other."""
# A prompt of 160 k tokens that is preempted near its end would begin again.
FAR_TOKENS = 16_384
"""A state is kept after each multiple of so many tokens of a prompt."""
# A conversation goes back to such a state after 4 to 14 requests of its own, and others come between them.
_UNUSED_ROUNDS = 4
"""A state that a conversation went back to, or may go back to, is given up when so many times as many states as there
are slots were given up since it was used."""
_LONGEST_MESSAGE = 16_384
"""So many tokens at the end of a prompt are searched for the ends of its messages, which takes half a millisecond."""


class _Kept(NamedTuple):
    """A state that a step writes, and that can be hit from the next step on."""

    slot: int
    request: RequestKV
    num_tokens: int
    state: RequestState
    is_spare: bool = False
    """Whether it gives way to all others."""


class StateSlotPool:
    """Owns the slots. It plans which of them each run of a step reads and writes, and what is kept.

    The steps of an engine run one after the other, so a slot may get a new owner while an earlier step still uses it.
    Within a step the requests are computed at the same time: what one of them writes, no other one reads or writes.
    """

    def __init__(
        self, kv_cache: KVCacheConfig, cache: CacheConfig, blocks: BlockPool, register: Callable[[RequestKV], None]
    ) -> None:
        """``blocks``: those of the KV cache, whose hashes name the states. ``register``: lets a request's full blocks
        be hit."""
        self.pool = BlockPool(kv_cache.num_state_slots)
        self.chunk = kv_cache.state_chunk
        """As in ``ModelInfo.state_chunk``."""
        self.is_strict = self.chunk > 1
        """Whether results depend on where prompts are cut, and on which tokens were decoded."""
        self.boundary = lcm(cache.block_size, self.chunk)
        """States are kept after multiples of so many tokens."""
        self.keeps_all = kv_cache.keeps_every_state
        """Whether a state is kept at each boundary."""
        self.runs: list[StateRun] = []
        """Those of the step that is being planned, in the order in which its requests were added."""
        self.fork_tokens = FORK_TOKENS
        self.far_tokens = FAR_TOKENS
        self.defers = False
        """Whether steps are planned before the drafts of those before them are verified."""
        self.num_kept = 0
        """How many states were kept so far."""
        self.preempted = Counter[str]()
        """Preempted requests that began again, by ``PREEMPTED_OUTCOMES``."""
        self._keeps_any = cache.enable_prefix_caching
        self._block_size = cache.block_size
        self._blocks = blocks
        self._register = register
        self.events: StateEvents | None = None
        self.parked_store: ParkedStore | None = None
        """Where content of preempted requests goes that the pools give up; None: nowhere."""
        self._num_hits = [0] * kv_cache.num_state_slots  # of the state that each slot has
        self._begins_branch = [False] * kv_cache.num_state_slots  # whether each slot's state ends such a prompt
        self._num_demoted = 0
        self._used_at = [0] * kv_cache.num_state_slots  # how many were demoted when it was kept or last hit
        self._kept: list[_Kept] = []  # bounded by the step
        self._draft_runs: dict[str, list[StateRun]] = {}  # of the step that is being planned
        self._read: list[int] = []  # slots that the step reads and no request owns any more
        # Of running requests: those of whose prompt a state is still to be kept, and after how many tokens. One that
        # has loaded a part may be behind the very request that would wait for it: it comes in with its first run.
        self._prompts: dict[str, tuple[RequestKV, int]] = {}
        blocks.listeners.append(_Followers(self))

    @property
    def most_of_chunk(self) -> int:
        """Tokens that a prompt may have to compute in one step, so that its chunk ends where it may."""
        return self.chunk + 1 if self.is_strict else 0

    @property
    def num_coming(self) -> int:
        """States for which a waiting request may wait, because a running one is about to keep them."""
        return len(self._prompts) + len(self._kept)

    def begin_step(self) -> None:
        """Let what the step before writes be hit, and what it reads be written."""
        kept, self._kept = self._kept, []
        is_new = [self._keep(each) for each in kept]
        self.pool.release([each.slot for each in kept] + self._read)
        self._read = []
        for each, is_first in zip(kept, is_new, strict=True):
            if is_first and each.is_spare:
                self._give_up(each.slot)
            elif is_first and each.state.hit:
                self._demote(each.state)

    def can_run(self, state: RequestState) -> bool:
        """Return whether the next run of a request has a slot to write to."""
        return not state.is_kept or self.pool.num_free > 0 or self._is_alone(state.slot)

    def add_decode(self, request: RequestKV, slot: int) -> None:
        """Add a run of one token that changes the request's own slot."""
        self.runs.append(StateRun(request.request_id, 1, slot, slot))

    def add(self, request: RequestKV, num_tokens: int) -> None:
        """Plan the runs of a request's next tokens. The caller has asked :meth:`can_run`."""
        state = request.state
        assert state is not None
        position = request.num_computed_tokens
        end = position + num_tokens
        kept = set(self._boundaries(request, position, end))
        for stop in sorted({*kept, *self._replayed(request, position, end), end}):
            # A slot for what is kept is no reason to stop another request, or this one.
            is_kept = stop in kept and (stop == end or self.pool.num_free > 1)
            read = state.slot
            if state.lent_slot >= 0 and stop == state.lent_at:
                state.slot, state.lent_slot = state.lent_slot, -1
            elif state.is_kept:
                state.slot = self._take(read)
            if read >= 0 and read != state.slot:
                self._read.append(read)
            self.runs.append(StateRun(request.request_id, stop - position, read, state.slot))
            state.is_kept, position = is_kept, stop
            if is_kept:
                self.pool.share([state.slot])
                self._kept.append(_Kept(state.slot, request, stop, state, is_spare=stop == state.message))
        if end >= state.last:
            self._prompts.pop(request.request_id, None)
        else:
            self._prompts[request.request_id] = (request, state.last)

    def add_drafts(self, request: RequestKV, num_drafts: int) -> None:
        """Plan the runs of drafts after the token of a request that the step computes. A slot is free for them."""
        state = request.state
        assert state is not None
        state.num_drafts = num_drafts
        if self.defers:  # where drafts are in flight, the worker alone knows which of its two slots has the state
            state.num_verifying += 1
        if not self.defers or state.draft_slot < 0:
            assert state.draft_slot < 0, "the drafts of one step at a time"
            [state.draft_slot] = self.pool.allocate(1)
        # Drafts are verified in the form of decoded tokens, whatever their number.
        counts = [1] * num_drafts if self.is_strict else [num_drafts]
        read, runs = state.slot, self._draft_runs.setdefault(request.request_id, [])
        for count in counts:
            runs.append(StateRun(request.request_id, count, read, state.draft_slot))
            read = state.draft_slot

    def verified(self, request: RequestKV, num_drafts: int, num_right: int) -> int:
        """Choose the state of a request whose drafts were verified. Returns how many of their tokens count as computed:
        all, or none if one was wrong. Then its state is the one before them, and those that were right are computed
        again with the next token."""
        state = request.state
        assert state is not None
        draft_slot, state.draft_slot = state.draft_slot, -1
        assert draft_slot >= 0, "the drafts have no state"
        if self.defers:
            return self._verified_later(state, draft_slot, num_drafts, num_right)
        if num_right < num_drafts:
            self.pool.release([draft_slot])
            return 0
        self.pool.release([state.slot])
        state.slot, state.is_kept = draft_slot, False
        return num_drafts

    def _verified_later(self, state: RequestState, draft_slot: int, num_drafts: int, num_right: int) -> int:
        """Do the same where another step of the request may be in flight. Those that were right count as computed: that
        step, or the next one, computes them again."""
        if num_drafts and num_right == num_drafts:
            state.slot, draft_slot, state.is_kept = draft_slot, state.slot, False
        state.num_verifying -= 1
        if state.num_verifying:
            state.draft_slot = draft_slot
        else:
            self.pool.release([draft_slot])
        return num_right

    def take_runs(self) -> list[StateRun]:
        """Return the runs of the planned step, those of each request together."""
        runs, self.runs = self.runs, []
        drafts, self._draft_runs = self._draft_runs, {}
        if not drafts:
            return runs
        merged = list[StateRun]()
        for index, run in enumerate(runs):
            merged.append(run)
            if run.req_id in drafts and (index + 1 == len(runs) or runs[index + 1].req_id != run.req_id):
                merged += drafts[run.req_id]
        return merged

    def whole_chunks(self, request: RequestKV, num_tokens: int, most: int) -> int:
        """Return how many of a request's next ``num_tokens`` tokens a step computes: as many as end at a multiple of
        the chunk, or with the prompt; otherwise the fewest that do, if they are not more than ``most``. 0: none, they
        wait for a step with more room."""
        begin, length = request.num_computed_tokens, request.num_prompt_tokens
        if not self.is_strict or begin + num_tokens >= length:
            return num_tokens
        end = (begin + num_tokens) // self.chunk * self.chunk
        if length - end < 2:  # a single token at the end would be computed in the form of decoded ones
            end -= self.chunk
        if end > begin:
            return end - begin
        fewest = self.fewest_tokens(request, begin)
        return fewest if fewest <= most else 0

    def fewest_tokens(self, request: RequestKV, begin: int) -> int:
        """Return how many tokens from ``begin`` on a step must compute at least."""
        length = request.num_prompt_tokens
        if not self.is_strict or begin >= length:
            return 1
        end = (begin // self.chunk + 1) * self.chunk
        return (end if length - end >= 2 else length) - begin

    def longest(self, request: RequestKV, num_blocks: int) -> int:
        """Return how many of the first ``num_blocks`` blocks of a request end where a state is kept."""
        for count in self.ends(request, num_blocks):
            if self.pool.find(request.block_hashes[count - 1]) is not None:
                return count
        return 0

    def ends(self, request: RequestKV, num_blocks: int) -> range:
        """Return after how many of the first ``num_blocks`` blocks of a request a state may be found, most first."""
        step = self.boundary // self._block_size
        most = num_blocks
        if self.is_strict:
            # Tokens that were decoded are not taken from a prompt, and two of the prompt are left.
            most = min(most, (request.num_prompt_tokens - 2) // self._block_size)
        return range(most // step * step, 0, -step)

    def can_begin(self, request: RequestKV, num_hit_tokens: int, *, loads: bool = False) -> bool:
        """Return whether a waiting request gets a slot, and another one if it lends its last state, and whether no
        other request is about to keep a state that it would rather begin with. ``loads``: it loads one."""
        num_needed = int(request.remote is not None and bool(request.remote.lease_id))
        if (state := request.state) is not None:  # it has loaded one
            return self.pool.num_free >= num_needed + (state.is_kept and not self._is_alone(state.slot))
        return self.pool.num_free > num_needed and (loads or not self._is_coming(request, num_hit_tokens))

    def begin(self, request: RequestKV, num_hits: int, num_found: int) -> None:
        """Give an admitted request the state after its ``num_hits`` cached blocks. ``num_found``: blocks whose KV was
        found, with or without a state."""
        state = request.state = RequestState()
        if num_hits:
            state.hit = request.block_hashes[num_hits - 1]
            slot = self.pool.find(state.hit)
            assert slot is not None, "its blocks were shortened to a state"
            self.pool.share([slot])
            self._num_hits[slot] += 1
            self._used_at[slot] = self._num_demoted
            state.slot = slot
        state.is_branch = not num_hits or self._num_hits[state.slot] > 1
        if (num_found - num_hits) * self._block_size >= self.fork_tokens:
            state.fork = num_found * self._block_size // self.boundary * self.boundary
        if self._keeps_any:
            self._choose_ends(request, state)

    def lend(self, request: RequestKV, num_tokens: int) -> int:
        """Choose the slot for the state after ``num_tokens`` tokens of an admitted request, which another engine will
        read.

        The reader learns it before they are computed; only the run that computes the last of them writes to it.
        """
        assert request.state is not None, "it was admitted"
        [slot] = self.pool.allocate(1)
        request.state.lent_slot, request.state.lent_at = slot, num_tokens
        return slot

    def begin_load(self, request: RequestKV) -> None:
        """Give an admitted request a slot for the state that it loads."""
        state = request.state
        assert state is not None, "it was admitted"
        if state.slot >= 0:
            self.pool.release([state.slot])
        [state.slot] = self.pool.allocate(1)
        state.is_kept, state.hit = False, b""

    def begin_parked(self, request: RequestKV) -> None:
        """Prepare a request that was preempted, and that will load the state that it had."""
        state = request.state = RequestState()
        self._choose_ends(request, state)

    def finish_load(self, request: RequestKV) -> None:
        """Let the state that a request has loaded be hit from the next step on, if it is one that is kept."""
        state, num_tokens = request.state, request.num_computed_tokens
        assert state is not None, "it was admitted"
        # What another engine has decoded came with the prompt, and strict states are kept within prompts alone.
        most = request.num_prompt_tokens if self.is_strict else num_tokens
        if self._keeps_any and num_tokens and num_tokens % self.boundary == 0 and num_tokens <= most:
            state.is_kept = True
            self.pool.share([state.slot])
            self._kept.append(_Kept(state.slot, request, num_tokens, state))

    def is_pending(self, slot: int) -> bool:
        """Return whether the state in a slot can be hit from the next step on only."""
        return any(each.slot == slot for each in self._kept)

    def resume(self, request: RequestKV, name: bytes) -> None:
        """Give a request that was preempted the state that it had."""
        state = request.state = RequestState()
        slot = self.pool.find(name)
        assert slot is not None, "it was found"
        self.pool.share([slot])
        self.pool.unpark([slot])
        state.slot, state.is_kept = slot, self.pool.content_of(slot) is not None
        self._choose_ends(request, state)
        if state.last > request.num_computed_tokens:
            self._prompts[request.request_id] = (request, state.last)

    def give_back(self, request: RequestKV) -> None:
        """Take the slots of a request back, if it has any."""
        self._prompts.pop(request.request_id, None)
        state, request.state = request.state, None
        if state is not None:
            self.pool.release([slot for slot in (state.slot, state.draft_slot, state.lent_slot) if slot >= 0])

    def forget(self, block_hash: bytes) -> None:
        """Let the state with this hash not be found any more."""
        self.pool.forget_content([block_hash])

    def forget_all(self) -> None:
        """Let no state be found any more, nor those that the last step writes."""
        self.pool.release([each.slot for each in self._kept])
        self._kept = []
        self.pool.forget_all()

    def _keep(self, kept: _Kept) -> bool:
        """Let a state that was written be found. Returns whether no other slot has it."""
        request, index = kept.request, kept.num_tokens // self._block_size - 1
        # A token that was in flight when the step was planned is known now, unless its request ended before it.
        if len(request.all_token_ids) < kept.num_tokens:
            return False
        if len(request.block_hashes) <= index or self._blocks.find(request.block_hashes[index]) is None:
            self._register(request)
            if len(request.block_hashes) <= index or self._blocks.find(request.block_hashes[index]) is None:
                return False  # evicted already, or wrong
        is_new = self.pool.register(kept.slot, request.block_hashes[index])
        if is_new:
            self.num_kept += 1
            self._num_hits[kept.slot] = 0
            self._begins_branch[kept.slot] = kept.state.is_branch and kept.num_tokens == kept.state.last
            self._used_at[kept.slot] = self._num_demoted
            if self.events is not None:
                self.events.stored(request.block_hashes, index + 1)
        return is_new

    def _demote(self, state: RequestState) -> None:
        """Let the state that a request began with be replaced first, now that one further on is kept."""
        slot = self.pool.find(state.hit)
        # Turns of a conversation hit the latest state, but a beginning that others share is hit again. Where the user
        # speaks, templates drop what the model thought, and the state where the user spoke before is hit. That is the
        # last state of the prompt that went back the last time. With 24 agents in 48 GiB, Qwen3-Next's sizes, this and
        # `_UNUSED_ROUNDS` raise what is found from 89 to 94 % of their prompts.
        if not self.keeps_all and slot is not None and self._num_hits[slot] == 1 and not self._begins_branch[slot]:
            self._give_up(slot)
        state.hit = b""

    def _give_up(self, slot: int) -> None:
        """Let a state be replaced before others; and the one that is unused for longest, if it is for too long. A state
        that was hit twice would stay for ever otherwise."""
        self.pool.demote(slot)
        self._num_demoted += 1
        oldest = self.pool.oldest()
        if oldest is not None and self._num_demoted - self._used_at[oldest] > _UNUSED_ROUNDS * self.pool.num_blocks:
            self.pool.demote(oldest)

    def _take(self, slot: int) -> int:
        """Return a slot to write to for a request whose state lies in ``slot``, which is to stay if there is room."""
        if self.pool.num_free:
            return self.pool.allocate(1)[0]
        if (content := self.pool.content_of(slot)) is not None:
            self.pool.evict(content)
        return slot

    def _is_alone(self, slot: int) -> bool:
        """Return whether only its owner has a slot, so that nothing but a later hit is lost if it changes in place."""
        return slot >= 0 and self.pool.ref_counts[slot] == 1

    def _choose_ends(self, request: RequestKV, state: RequestState) -> None:
        """Choose after which tokens near the end of a prompt states are kept.

        The stop tokens in a prompt say where its messages end. What a template writes behind the last one opens the
        answer, and may stand in no later prompt. A client that changes its last message goes on from the one before.
        """
        length = request.num_prompt_tokens
        ends = list[int]()
        if stop_token_ids := request.stop_token_ids:
            tokens = request.all_token_ids
            for index in range(length - 1, max(0, length - _LONGEST_MESSAGE) - 1, -1):
                if tokens[index] in stop_token_ids:
                    ends.append(index + 1)
                    if len(ends) == 2:
                        break
        last = length - (2 if self.is_strict else 1)
        if ends and length - ends[0] <= self.boundary:
            last = min(last, ends[0])
        state.last = last // self.boundary * self.boundary
        if len(ends) == 2 and (before := ends[1] // self.boundary * self.boundary) < state.last:
            state.message = before

    def _boundaries(self, request: RequestKV, begin: int, end: int) -> Iterable[int]:
        """Return after how many tokens in (begin, end] a state is to be kept."""
        state = request.state
        if not self._keeps_any or state is None:
            return ()
        last = state.last
        if self.keeps_all:
            step, most = self.boundary, end
            if self.is_strict:
                most = min(end, (request.num_prompt_tokens - 2) // step * step)
            return range((begin // step + 1) * step, most + 1, step)
        step = self.far_tokens // self.boundary * self.boundary
        stops = {last, min(state.fork, last), state.message}
        if step:
            stops.update(range((begin // step + 1) * step, min(end, last) + 1, step))
        return [stop for stop in stops if begin < stop <= end]

    def _replayed(self, request: RequestKV, begin: int, end: int) -> Iterable[int]:
        """Return where the runs of tokens in (begin, end) that were decoded once, one by one, end."""
        return range(max(request.num_prompt_tokens, begin + 1), end) if self.is_strict else ()

    def _is_coming(self, request: RequestKV, num_hit_tokens: int) -> bool:
        """Return whether a state of more tokens of a waiting request is kept soon."""
        if not (self._prompts or self._kept) or request.skip_reading_prefix_cache:
            return False
        most = request.num_prompt_tokens - 2 if self.is_strict else request.num_cacheable_tokens
        coming = [*self._prompts.values(), *((each.request, each.num_tokens) for each in self._kept)]
        return any(num_hit_tokens < end <= most and _are_equal(request, other, end) for other, end in coming)


class _Followers:
    """Drops the states whose KV blocks are gone. Implements ``EvictionListener``."""

    def __init__(self, states: StateSlotPool) -> None:
        self._states = states

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self._states.pool.evict(block_hash)

    def forgot(self, block_hash: bytes) -> None:
        self._states.forget(block_hash)

    def forgot_all(self) -> None:
        self._states.forget_all()


def _are_equal(one: RequestKV, other: RequestKV, num_tokens: int) -> bool:
    """Return whether the first tokens of two requests are known to have the same states."""
    if one.cache_salt != other.cache_salt or one.prompt_embeds or other.prompt_embeds or one.media or other.media:
        return False
    ours, theirs = one.all_token_ids, other.all_token_ids
    return (
        len(theirs) >= num_tokens
        and ours[num_tokens - 1] == theirs[num_tokens - 1]
        and (ours[:num_tokens] == theirs[:num_tokens])
    )
