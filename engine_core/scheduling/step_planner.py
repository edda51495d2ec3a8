"""Plans a step: running requests continue, then waiting ones begin, as far as tokens, rows and blocks reach."""

import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice

from ..data.config import SchedulerConfig
from ..data.embedding_rows import EmbedsSpan
from ..data.messages import EngineCoreOutput
from ..data.request import Request, RequestKV, RequestStatus
from ..data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from ..kv_cache.kv_manager import KVManager
from .adapters import Adapters
from .live_requests import Admission, LiveRequests
from .remote_kv import RemoteKV
from .seats import (
    PromptShare,
    PromptTurns,
    cost_per_token,
    count_seats,
    index_to_preempt,
    rows_to_defer,
    seat_to_take_back,
)
from .stats_recorder import StatsRecorder

_NONE: frozenset[str] = frozenset()


class PauseState(enum.IntEnum):
    """Which requests the scheduler still plans (names and values as in vLLM V1)."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Requests that have begun continue, preempted ones too; no other request begins."""
    PAUSED_ALL = 2
    """None."""


class StepPlan:
    """Collects, in columns, what the worker must know of a step, and keeps its token budget."""

    __slots__ = (
        "_budget_at_start",
        "_computed",
        "_new",
        "_new_block_ids",
        "_req_ids",
        "_resumed",
        "budget",
        "cross_block_ids",
        "early_outputs",
        "finished_req_ids",
        "media_rows",
        "num_scheduled_tokens",
        "preempted_req_ids",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._budget_at_start = budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted_req_ids: list[str] = []
        self.finished_req_ids: list[str] = []
        self.early_outputs: list[EngineCoreOutput] = []
        self.media_rows: dict[str, list[EmbedsSpan]] = {}
        self.cross_block_ids: dict[str, list[int]] = {}
        self._new: list[NewRequestData] = []
        self._req_ids: list[str] = []
        self._new_block_ids: list[list[int]] = []
        self._computed: list[int] = []
        self._resumed: dict[str, list[int]] = {}

    def add_running(self, request: Request, num_new_tokens: int, new_block_ids: list[int]) -> None:
        """Add a request that has a row in the worker."""
        request_id = request.request_id
        self._req_ids.append(request_id)
        self._new_block_ids.append(new_block_ids)
        self._computed.append(request.kv.num_computed_tokens)
        request.kv.num_computed_tokens += num_new_tokens
        self.num_scheduled_tokens[request_id] = num_new_tokens
        self.budget -= num_new_tokens

    def add_decodes(self, requests: Sequence[Request], allocate: Callable[[RequestKV, int], list[int] | None]) -> int:
        """Add requests of which each computes one token, from the first one on, as :meth:`add_running` does: up to one
        that needs more thought, because it misses several tokens, will be full or gets no block. Returns how many.

        This runs for nearly every request of every step, so the loop is written out.
        """
        req_ids, new_block_ids, computed = self._req_ids, self._new_block_ids, self._computed
        count = 0
        for request in requests[: self.budget]:
            kv, num_in_flight = request.kv, request.num_output_placeholders
            num_computed = kv.num_computed_tokens
            if request.num_tokens + num_in_flight - num_computed != 1 or (num_in_flight and request.will_be_full):
                break
            if (block_ids := allocate(kv, 1)) is None:
                break
            req_ids.append(request.request_id)
            new_block_ids.append(block_ids)
            computed.append(num_computed)
            kv.num_computed_tokens = num_computed + 1
            count += 1
        self.num_scheduled_tokens.update(dict.fromkeys(req_ids[len(req_ids) - count :], 1))
        self.budget -= count
        return count

    def add_resumed(self, request: Request, num_new_tokens: int) -> None:
        """Add a request that was preempted: the worker builds its row anew."""
        self._resumed[request.request_id] = request.all_token_ids.copy()
        self.add_running(request, num_new_tokens, request.kv.block_ids.copy())

    def add_new(self, request: Request, num_new_tokens: int) -> None:
        """Add a request that the worker has never seen."""
        self._new.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.all_token_ids[request.num_prompt_tokens :],
                sampling_params=request.sampling_params,
                block_ids=request.kv.block_ids.copy(),
                num_computed_tokens=request.kv.num_computed_tokens,
                prompt_embeds=request.kv.prompt_embeds,
                adapter=request.adapter,
                pooling_params=request.pooling_params,
                media=request.kv.media,
                tenant=request.tenant,
                cache_salt=request.kv.cache_salt,
            )
        )
        request.kv.num_computed_tokens += num_new_tokens
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.budget -= num_new_tokens

    @property
    def num_planned(self) -> int:
        """The tokens of the step so far."""
        return self._budget_at_start - self.budget

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=CachedRequestData(self._req_ids, self._new_block_ids, self._computed, self._resumed),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=self._budget_at_start - self.budget,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            media_rows=self.media_rows,
            cross_block_ids=self.cross_block_ids,
        )


class StepPlanner:
    """Decides which requests run and which wait; the last of the running requests are preempted first.

    While several tenants have requests, :mod:`.seats` says which one gives up its seat or its blocks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        live: LiveRequests,
        kv: KVManager,
        remote: RemoteKV | None,
        recorder: StatsRecorder,
        clock: Callable[[], int],
        adapters: Adapters | None = None,
        num_stages: int = 1,
    ) -> None:
        """``clock`` returns nanoseconds. ``adapters``: None if no request may name one. ``num_stages``: steps of
        different requests at the same time: as many as the model has parts, or more if each needs the last one's end.
        """
        self._num_stages = num_stages
        self._adapters = adapters
        self._live = live
        self._running = live.running
        self._waiting = live.waiting
        self._kv = kv
        self._states = kv.states
        # What the first prompt of a step gets at least, or it would wait for ever.
        self._fewest_of_prompt = 0 if kv.states is None else kv.states.most_of_chunk
        self._remote = remote
        self._recorder = recorder
        self._clock = clock
        self._max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        least = config.prefill_tokens_beside_decode if config.enable_chunked_prefill else None
        self.prompt_share = PromptShare(least) if least is not None else None
        """Limits the prompt tokens of a step, and orders prompts; None: nothing does."""
        self._left_of_gap = 0
        """Prompt tokens that may still be computed before those that decode get their next token; 0: none are held."""
        self._full_at = 0
        """When a request last waited for a seat or for blocks, on ``clock``."""
        self._left_unused = False
        """Whether the last step left tokens for requests that wait, of which none could begin."""
        self.admission = Admission(live, kv, remote, config, clock, adapters)
        self._has_deferred = False
        self._crowded: str | None = None
        """The request for whose image the next step leaves out the others; empty: one that waits."""
        self._tails = set[str]()
        """The running requests of which one token is missing that has the row of an image: it is no decoded token."""
        self._prompt_turns = PromptTurns() if config.enable_chunked_prefill else None
        self._grants: Counter[str] | None = None
        """What the prompts of each tenant may still cost in this step; None: as much as its tokens, of any tenant."""
        self._has_rest = False
        """Whether a running request may have a rest of its prompt to compute."""
        self._advanced = set[str]()
        """The tenants of which a prompt gets on in this step; kept while there are grants."""
        self._shares: dict[str, int] | None = None
        """What each begun prompt may compute in this step; None: as much as there is, from the first one on."""

    def plan(self, pause_state: PauseState) -> StepPlan:
        """Plan a step, which is empty when no request can run.

        It decides in this order: which running requests are left out, how many tokens the step has and how prompts
        divide them, what the running requests compute, and which of the waiting ones begin.
        """
        if self._adapters is not None:
            self._adapters.begin_step(self._running)
        taken_back, deferred = None, _NONE
        if self._live.are_several and pause_state is PauseState.UNPAUSED:
            # Before the running requests are planned, or the victim would have a row in this step and be preempted in
            # it.
            taken_back = self._take_back_seat()
            deferred = self._rows_to_defer()
        if self._crowded is not None:
            deferred |= {request.request_id for request in self._running if request.request_id != self._crowded}
            self._crowded = None
        others = _NONE if self._num_stages == 1 else self._rows_of_other_steps()
        begun = self._begun_prompts() if self._has_rest else []
        prompts = begun
        # The number of waiting tokens is 0 exactly when the queue is empty. Where nothing runs, a step has no budget to
        # divide, and waiting requests begin in their own order.
        if self._running and (begun or self._waiting.num_tokens) and (share := self.prompt_share) is not None:
            may_begin = pause_state is PauseState.UNPAUSED and not self._left_unused
            prompts = self._prompts_by_slowdown(share, begun, may_begin)
        plan = StepPlan(0 if pause_state is PauseState.PAUSED_ALL else self._token_budget(begun, prompts))
        held = self._decoding(begun) if self._left_of_gap else _NONE
        self._grants = self._shares = None
        if (turns := self._prompt_turns) is not None and (self._live.are_several or self._live.num_costly):
            self._grants = self._deal_to_tenants(turns, plan.budget) if begun or self._waiting else None
        if begun and len(prompts) > 1:
            self._shares = self._deal(prompts, plan.budget - (0 if held else len(self._running) - len(begun)))
        if self._running:
            self._plan_running(plan, deferred | others | held if deferred or others or held else _NONE)
        # A step that had to preempt admits no one: a newcomer would take the blocks that the victim has just given up.
        has_room = not plan.preempted_req_ids
        # After has_room is read: a seat that was taken back is meant for a waiting request of this very step.
        if taken_back is not None:
            plan.preempted_req_ids.append(taken_back)
        num_running = len(self._running)
        if has_room and self._waiting.num_tokens:
            # Unlike in vLLM, preempted requests resume in a pause that waits: its answer comes when no request that had
            # begun is left, and these had begun.
            self._plan_waiting(plan, only_begun=pause_state is not PauseState.UNPAUSED)
        self._left_unused = plan.budget > 0 and len(prompts) > len(begun) > 0 and len(self._running) <= num_running
        if deferred and len(self._running) <= num_running:  # no request began, so there is no reason to leave any out
            left_out = others.union(plan.num_scheduled_tokens, held)
            self._plan_running(plan, left_out, may_preempt=not plan.num_scheduled_tokens)
        if held and not plan.num_scheduled_tokens:  # no prompt could get on, so there is no reason to hold any
            self._left_of_gap = 0
            self._plan_running(plan, others)
        return plan

    def _deal_to_tenants(self, turns: PromptTurns, budget: int) -> Counter[str]:
        """Return what the prompts of each tenant may cost in this step, which computes ``budget`` tokens."""
        heads = self._waiting.heads(None) if self._waiting else ()
        share = self.prompt_share if self._live.num_costly else None
        beside_others = None if share is None else share.most_beside_others()
        self._advanced.clear()
        return turns.deal(budget, self._running, heads, beside_others)

    def requeue(self, request: Request, status: RequestStatus) -> None:
        """Take the blocks of a request back and let it wait again. The caller removes it from ``running``."""
        if self._remote is not None:
            self._remote.preempted(request)
        if status is RequestStatus.PREEMPTED:
            self._kv.park(request.kv)
        self._kv.free(request.kv)
        if request.kv.media and self._live.media is not None:
            self._live.media.drop(request)
        request.set_status(status)
        if status is RequestStatus.PREEMPTED:
            self._recorder.preempted(request)
        self._waiting.prepend(request)

    def _take_back_seat(self) -> str | None:
        """Preempt a request, if all seats are taken and that makes the tenants' shares fairer. Returns its id.

        The seat goes to the next waiting request in this step. The request that lost it continues later, and its blocks
        can be hit until they are needed; so no seat is taken back without a prefix cache.
        """
        if len(self._running) < self._max_num_seqs or not self._waiting or not self._kv.enable_prefix_caching:
            return None
        seats = self._count_seats()
        head = self.admission.head(seats)
        if head is None or head.num_output_placeholders:  # it may not begin yet
            return None
        request = seat_to_take_back(self._running, seats, head)
        if request is None:
            return None
        self._live.take_out(request)
        self.requeue(request, RequestStatus.PREEMPTED)
        return request.request_id

    def _rows_to_defer(self) -> frozenset[str]:
        """Return the ids of running requests that this step leaves out for another tenant's first token: at most every
        second step leaves any out."""
        had_deferred, self._has_deferred = self._has_deferred, False
        # At most every second step: a tenant whose rows are costly keeps at least half of its speed while others
        # arrive.
        if had_deferred or not self._waiting:
            return frozenset()
        seats = self._count_seats()
        head = self.admission.head(seats)
        rows = frozenset[str]() if head is None else rows_to_defer(self._running, seats, head)
        self._has_deferred = bool(rows)
        return rows

    def _rows_of_other_steps(self) -> frozenset[str]:
        """Return the ids of running requests that this step leaves to those which other stages compute meanwhile: each
        request whose next token is still in flight, and of the others all but one stage's share."""
        # With pipeline stages the first stage would otherwise wait for tokens that the last one has not sampled yet.
        # Two requests are enough to keep two stages busy.
        in_flight = [request for request in self._running if request.num_output_placeholders]
        free = [request for request in self._running if not request.num_output_placeholders]
        share = -(-len(self._running) // self._num_stages)
        return frozenset(request.request_id for request in in_flight + free[share:])

    def _count_seats(self) -> Counter[str]:
        """Return how many requests of each tenant run or load KV."""
        return count_seats(self._running if self._remote is None else chain(self._running, self._remote.waiting))

    def _token_budget(self, begun: Sequence[Request], prompts: Sequence[Request]) -> int:
        """Return how many tokens the step may compute. Fewer while any request decodes: each prompt token delays the
        next token of every decoding request. Never fewer than there are requests that the step does not hold.

        ``begun``: the running requests that compute prompts; ``prompts``: those and the ones that may begin now.
        """
        share, num_left = self.prompt_share, self._left_of_gap
        self._left_of_gap = 0
        if share is None:
            return self._max_tokens
        num_decoding = len(self._running) - len(begun)
        fewest = len(begun) + self._fewest_of_prompt
        at_once = share.most_at_once
        if len(prompts) > 1 and self._num_stages == 1:  # stages compute several such steps at a time
            at_once = share.most_of_burst(prompts)
        if not num_decoding:
            return min(self._max_tokens, max(fewest, at_once))
        if not prompts:  # what is left over is for drafts
            return min(self._max_tokens, num_decoding + max(fewest, share.least))
        num_tokens = min(self._max_tokens, share.num_tokens(num_decoding, prompts, self._clock(), self._full_at))
        if self._live.are_several and self._delays_others():
            num_tokens = min(num_tokens, share.most_beside_others())
        if num_left:
            num_tokens = min(num_tokens, num_left)
        # In steps of their own the first prompts of a burst have their first tokens before the last ones are computed,
        # and those that decode wait no longer than for one large step.
        if num_tokens >= 2 * at_once and self._num_stages == 1:
            self._left_of_gap = num_tokens - at_once
            return min(self._max_tokens, max(fewest, at_once, num_decoding))
        return min(self._max_tokens, num_decoding + max(fewest, num_tokens))

    def _begun_prompts(self) -> list[Request]:
        """Return the running requests that compute prompts, wherever they stand: a short prompt begins and ends beside
        long ones, and then decodes behind them."""
        begun = [
            request
            for request in self._running
            # The last token of a prompt may be the only one that is missing.
            if request.num_missing_tokens > 1 or request.kv.num_computed_tokens < request.num_prompt_tokens
        ]
        self._has_rest = bool(begun)
        return begun

    def _prompts_by_slowdown(self, share: PromptShare, begun: list[Request], may_begin: bool) -> list[Request]:
        """Return the ``begun`` prompts and, if ``may_begin``, those that wait for a step, the most urgent one first."""
        # Prompts without a seat or blocks cannot be brought forward by a larger step, so they do not count.
        num_free = self._max_num_seqs - len(self._running)
        prompts, num_tokens = begun, 0
        if self._waiting and (num_free <= 0 or self.admission.is_blocked):
            self._full_at = self._clock()
        elif self._waiting and may_begin:
            prompts = begun.copy()
            for request in islice(self._waiting, num_free):
                prompts.append(request)
                num_tokens += request.num_missing_tokens
                if num_tokens >= 2 * self._max_tokens:  # more do not change how it is divided
                    break
        return share.by_slowdown(prompts, self._clock()) if len(prompts) > 1 else prompts

    def _decoding(self, begun: Sequence[Request]) -> frozenset[str]:
        """Return the ids of the running requests that compute no prompt."""
        return frozenset(request.request_id for request in self._running).difference(
            request.request_id for request in begun
        )

    def _deal(self, prompts: Sequence[Request], budget: int) -> dict[str, int]:
        """Return what each of ``prompts`` may compute, the first one as much as it needs. What is dealt to those that
        wait is left for them, however long the prompts are that have begun."""
        grants = None if self._grants is None else self._grants.copy()
        shares: dict[str, int] = {}
        for request in prompts:
            num_tokens = min(request.num_missing_tokens, budget)
            if grants is not None:
                cost = cost_per_token(request)
                num_tokens = min(num_tokens, max(grants[request.tenant], 0) // cost)
                grants[request.tenant] -= num_tokens * cost
            shares[request.request_id] = num_tokens
            budget -= num_tokens
        return shares

    def _delays_others(self) -> bool:
        """Return whether the tenant of a prompt delays another one that decodes."""
        decoding = {request.tenant for request in self._running if request.num_missing_tokens <= 1}
        prompts = {request.tenant for request in self._running if request.num_missing_tokens > 1}
        return not prompts.union(self._waiting.tenants) <= decoding or len(decoding) > 1

    def _plan_running(self, plan: StepPlan, left_out: Collection[str] = (), *, may_preempt: bool = True) -> None:
        """Plan the running requests but for the ids ``left_out``."""
        running, allocate = self._running, self._kv.allocate
        if left_out or self._tails:
            self._tails.intersection_update(request.request_id for request in running)
            index = 0
        else:
            index = plan.add_decodes(running, allocate)
        while index < len(running) and plan.budget > 0:
            request = running[index]
            is_full = request.num_output_placeholders and request.will_be_full
            if is_full or (left_out and request.request_id in left_out):
                index += 1
                continue
            num_new_tokens = request.num_missing_tokens
            if num_new_tokens > 1 or request.request_id in self._tails:
                # Each of those after it gets at least one token; so does it, though what rows that were left out would
                # have taken, or what rows got that were planned before, is no longer in the budget.
                room = plan.budget - (len(running) - index - 1)
                if self._fewest_of_prompt and request.kv.num_computed_tokens >= request.num_prompt_tokens:
                    # Tokens that wrong drafts made it compute again. With 32 such requests they left a prompt less than
                    # a whole chunk in each step, for as long as these decoded.
                    room -= self._fewest_of_prompt
                # Its tenant's grant is used up by the prompts before it, which end the sooner: twelve prompts that got
                # one token each made a step twice as long as one prompt with twelve.
                if self._grants is not None and self._has_had_its_turn(request):
                    index += 1
                    continue
                num_new_tokens = self._chunk(request, max(1, room), plan)
                if not num_new_tokens:
                    index += 1
                    continue
            # Before another request is preempted, which may be the only one that holds them.
            rows = self._rows(request, num_new_tokens) if request.kv.media else None
            new_block_ids = allocate(request.kv, num_new_tokens)
            if new_block_ids is None and not may_preempt:
                return
            if new_block_ids is None and (new_block_ids := self._make_room(index, num_new_tokens, plan)) is None:
                continue  # the next request is at its index now
            if rows is not None:
                self._add_rows(request, num_new_tokens, rows, plan)
            plan.add_running(request, num_new_tokens, new_block_ids)
            index += 1

    def _chunk(self, request: Request, budget: int, plan: StepPlan) -> int:
        """Return how many tokens of a prompt the step computes; 0: rows of its next image are missing, or it, or a
        whole chunk of the layers that keep a state, does not fit into this step.

        A chunk ends before the prompt's first embedding. Other prompts share the blocks before it, and an embedding may
        make NaN, which masked attention spreads to earlier tokens of its chunk: 0 * NaN is NaN.
        """
        kv = request.kv
        # `Request.num_missing_tokens`, written out: a call less for each prompt of a step.
        num_missing = request.num_tokens + request.num_output_placeholders - kv.num_computed_tokens
        most = num_tokens = min(num_missing, budget, self._max_chunk)
        if self._grants is not None:
            # At least one token, so that it gets on.
            num_tokens = max(min(num_tokens, self._grants[request.tenant] // cost_per_token(request)), 1)
        if self._shares is not None and request.status is RequestStatus.RUNNING:
            num_tokens = max(min(num_tokens, self._shares.get(request.request_id, 1)), 1)
        cut = 0  # a chunk that may end anywhere
        if kv.prompt_embeds and kv.num_computed_tokens < kv.prompt_embeds[0].position:
            num_before = kv.prompt_embeds[0].position - kv.num_computed_tokens
            most = min(most, num_before)
            num_tokens, cut = min(num_tokens, most), most if most == num_before else 0
        if kv.media and kv.num_computed_tokens < kv.media[-1].end:
            if self._states is not None:
                # A tenant's share may be less than a chunk, which the rows of an image do not round up to.
                num_tokens = max(num_tokens, min(most, self._states.fewest_tokens(kv, kv.num_computed_tokens)))
            wanted, most = num_tokens, self._media_chunk(request, num_tokens, num_missing, plan)
            # Rows of an image may come only when the tokens before them are computed, so they end a chunk anywhere.
            num_tokens, cut = most, most if most < wanted else 0
        if self._states is not None:
            num_tokens = self._states.whole_chunks(kv, num_tokens, most) or cut
        if self._grants is not None:
            self._grants[request.tenant] -= num_tokens * cost_per_token(request)
            if num_tokens:
                self._advanced.add(request.tenant)
        if num_tokens < num_missing:
            self._has_rest = True
        return num_tokens

    def _has_had_its_turn(self, request: Request) -> bool:
        """Return whether the prompts of a request's tenant get on in this step and may cost no more."""
        assert self._grants is not None, "the caller has asked"
        return request.tenant in self._advanced and self._grants[request.tenant] < cost_per_token(request)

    def _media_chunk(self, request: Request, num_tokens: int, num_missing: int, plan: StepPlan) -> int:
        """Return how many of the next ``num_tokens`` tokens have their rows and need not be computed with later ones;
        more of an image that one step must compute. ``num_missing``: tokens that are not computed."""
        media, kv = self._live.media, request.kv
        assert media is not None, "a model that reads text only got images"
        start = kv.num_computed_tokens
        end = media.chunk_end(kv, start, start + num_tokens, start + self._max_tokens - plan.num_planned)
        if kv.media[-1].end == request.num_tokens:
            if end == request.num_tokens - 1:
                self._tails.add(request.request_id)
            else:
                self._tails.discard(request.request_id)
        if end == start and not media.is_starved(kv):
            self._crowded = request.request_id
        return end - start

    def _rows(self, request: Request, num_tokens: int) -> list[EmbedsSpan] | None:
        """Return the rows of the next tokens of a request; None: all of its images are computed."""
        media, start = self._live.media, request.kv.num_computed_tokens
        assert media is not None, "a model that reads text only got images"
        if start >= request.kv.media[-1].end and not request.kv.lacks_cross:
            return None
        return media.rows(request, start, start + num_tokens)

    def _add_rows(self, request: Request, num_tokens: int, rows: list[EmbedsSpan], plan: StepPlan) -> None:
        """Give the step the rows of the tokens that it computes."""
        assert self._live.media is not None, "a model that reads text only got images"
        if rows:
            plan.media_rows[request.request_id] = rows
        request.kv.lacks_cross = False
        self._live.media.computed(request, request.kv.num_computed_tokens + num_tokens)

    def _make_room(self, index: int, num_new_tokens: int, plan: StepPlan) -> list[int] | None:
        """Allocate blocks for a running request. Other engines lose their leases first; then running requests are
        preempted, the last one first. Returns None if the request itself was preempted.
        """
        request = self._running[index]
        while True:
            # Leases go before running requests: a reader that loses one computes the prompt itself, but a victim's
            # tokens are computed again while its client waits. A request that only waits for room leaves a lease alone
            # for 5 s of its 30.
            if self._remote is None or not self._remote.revoke_oldest():
                position = index_to_preempt(self._running, index) if self._live.are_several else -1
                victim = self._running[position]
                self._live.take_out(victim)
                self.requeue(victim, RequestStatus.PREEMPTED)
                plan.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return None
            if (new_block_ids := self._kv.allocate(request.kv, num_new_tokens)) is not None:
                return new_block_ids

    def _plan_waiting(self, plan: StepPlan, *, only_begun: bool) -> None:
        """Begin waiting requests, as far as tokens, rows and blocks reach."""
        self.admission.seats = self._count_seats() if self._live.are_several else None
        self.admission.is_crowded = False
        while plan.budget > 0 and self._waiting.num_tokens and len(self._running) < self._max_num_seqs:
            if self._grants is not None and all(self._grants[tenant] <= 0 for tenant in self._waiting.tenants):
                break  # those that wait have had their turn in this step
            room = self._max_tokens - plan.num_planned
            others_run = bool(self._running)
            request = self.admission.next(plan.budget, room, others_run=others_run, only_begun=only_begun)
            if request is None:
                break
            num_new_tokens = self._chunk(request, plan.budget, plan)
            if self._remote is not None:
                plan.early_outputs += self._remote.starts(request, num_new_tokens)
            new_block_ids = self._kv.allocate(request.kv, num_new_tokens)
            assert new_block_ids is not None, "an admitted request has room"
            self._live.run(request)
            self._recorder.started(request)
            if request.kv.media:
                if (rows := self._rows(request, num_new_tokens)) is not None:
                    self._add_rows(request, num_new_tokens, rows, plan)
                if request.kv.cross_block_ids:
                    plan.cross_block_ids[request.request_id] = request.kv.cross_block_ids.copy()
            if request.status is RequestStatus.PREEMPTED:
                plan.add_resumed(request, num_new_tokens)
            else:
                plan.add_new(request, num_new_tokens)
            request.set_status(RequestStatus.RUNNING)
        if self.admission.is_crowded:
            self._crowded = ""
