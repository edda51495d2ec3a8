"""Decides what each step computes: a token budget, spent so that every request catches up with its tokens."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec.structs import replace

from ..data.config import EngineConfig, SchedulerConfig
from ..data.core_params import ModelPooling
from ..data.kv_events import KVEventLog
from ..data.kv_groups import KVCacheConfig
from ..data.messages import AcceptTokens, ArrivedRows, EngineCoreRequest, ErrorKind, SchedulerStats
from ..data.request import Request, RequestStatus, finish_status
from ..data.scheduler_output import SchedulerOutput
from ..kv_cache.kv_manager import KVManager, make_kv_manager
from ..kv_transfer.kv_connector import KVConnectorOutput, KVConnectorScheduler
from ..structured_output.compiler import CompileQueueFull
from ..structured_output.manager import FIELD, StructuredOutputManager
from .adapters import Adapters
from .drafts import Drafts
from .live_requests import LiveRequests
from .media_rows import RowStore
from .pooled_requests import PooledRequests
from .remote_kv import RemoteKV
from .request_order import make_order
from .stats_recorder import StatsRecorder
from .step_planner import PauseState, StepPlanner
from .step_results import EndedRequests, StepResults
from .steps_in_flight import StepsInFlight

log = logging.getLogger(__name__)

_EXPIRED = "the request's time ran out before the engine could begin it"
_NO_ADAPTER = "the request's LoRA adapter is not loaded on this engine"
_GENERATES = ModelPooling()
_IN_QUEUE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Scheduler:
    """Schedules requests in the order of its policy: running before waiting, preempting from the tail.

    ``schedule`` and ``results.apply`` alternate; requests are added and aborted between steps. The time of a step
    does not grow with the length of sequences.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache: KVCacheConfig,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        connector: KVConnectorScheduler | None = None,
        grammars: StructuredOutputManager | None = None,
        adapters: Adapters | None = None,
        pooling: ModelPooling = _GENERATES,
        media: RowStore | None = None,
    ) -> None:
        """Raises ``ValueError`` naming a setting that does not work.

        Args:
            clock: Returns nanoseconds.
            connector: Loads KV from other engines or tiers and offers it to others, if given.
            grammars: Constrains structured outputs; without it they are refused.
            adapters: The LoRA adapters that requests may name; without it such requests are refused.
            pooling: What the model pools.
            media: The rows of images; None: the model reads text only.
        """
        scheduler, cache, speculative = config.scheduler, config.cache, config.speculative
        num_stages = config.parallel.pipeline_parallel_size
        _check_config(scheduler, kv_cache.max_model_len)
        self.config = scheduler
        self.max_model_len = kv_cache.max_model_len
        self.kv_events = KVEventLog(cache.block_size) if cache.kv_events else None
        self.kv = make_kv_manager(kv_cache, cache, scheduler, self.kv_events, lends=bool(config.kv.transports))
        self.kv.pool.kept.now = clock
        self._order = make_order(scheduler.policy, config.plugins)
        self.media = media
        self._states = self.kv.states
        self._hears = media is not None and media.cross_rows > 0  # each prompt has a sound beside it
        self._is_plain = media is None and self._states is None  # one test in place of several, twice in each step
        self._live = live = LiveRequests(by_priority=self._order.by_priority, media=media)
        self.requests, self.waiting, self.running = live.by_id, live.waiting, live.running
        self._remote = RemoteKV(connector, self.kv, config.kv.policy, clock) if connector is not None else None
        self._grammars = grammars
        self.pause_state = PauseState.UNPAUSED
        self._is_held = False
        self._is_stalled = False
        """Whether no request can run until something changes; each change that may let one run clears it."""
        self._clock = clock
        self._recorder = recorder = StatsRecorder(clock, cache, scheduler)
        self._adapters = adapters
        overlaps = bool(scheduler.async_scheduling)
        overlaps_drafts = speculative is not None and overlaps
        defers_drafts = overlaps_drafts and num_stages == 1
        if defers_drafts and self._states is not None:
            # Right drafts beside a wrong one are computed again, by a step that was planned before: their rows stay
            # free. Without enough of them a request waits for its last step, as with pipeline stages.
            assert speculative is not None
            num_again = scheduler.max_num_seqs * speculative.num_speculative_tokens
            num_others = scheduler.max_num_batched_tokens - num_again
            has_room = num_others >= num_again and num_others > self._states.most_of_chunk
            defers_drafts = has_room and scheduler.enable_chunked_prefill and not self._states.keeps_all
            self._states.defers = defers_drafts
            if defers_drafts:
                scheduler = replace(scheduler, max_num_batched_tokens=num_others)
            elif scheduler.overlaps_by_default:  # which saves less than twice as many steps cost
                overlaps = overlaps_drafts = False
        self._in_flight = StepsInFlight() if overlaps or num_stages > 1 else None
        self._most_tokens = scheduler.max_num_batched_tokens  # that a step plans, apart from drafts
        num_parts = max(num_stages, 2) if overlaps_drafts and not defers_drafts else num_stages
        self._planner = StepPlanner(scheduler, live, self.kv, self._remote, recorder, clock, adapters, num_parts)
        self.ended = EndedRequests(live, self.kv, self._remote, grammars, self._in_flight, recorder, adapters)
        if self._remote is not None:
            self._remote.on_kept = lambda output: self.ended.outputs.append(output)
        self.drafts: Drafts | None = None
        if speculative is not None:
            self.drafts = Drafts(speculative, self.requests, self.kv, grammars, clock, defers=defers_drafts)
        self._pooled = PooledRequests(pooling, kv_cache.max_model_len, clock)
        self.results = StepResults(live, self._in_flight, self.ended, recorder, self.drafts, self._pooled)
        self._preempted_req_ids: list[str] = []

    @property
    def overlaps(self) -> bool:
        """Whether a step may be planned while another one is in flight."""
        return self._in_flight is not None

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request, or end it at once: it is refused, or its accepted tokens meet an end condition."""
        assert message.request_id not in self.requests, f"request {message.request_id} is live already"
        request = Request(message, self.max_model_len, message.arrival_ns or self._clock())
        moves_kv = self._remote is not None
        is_pooled = request.pooling_params is not None
        error = self._pooled.refusal(request) if is_pooled or not self._pooled.generates else ""
        error = error or _refusal(request, self.kv, self.max_model_len, moves_kv=moves_kv)
        if request.priority or self._order.has_rank:  # nothing to say of any other request, and nothing to pay for it
            error = error or self._order.place(request)
        field = error.partition(" ")[0] if is_pooled else ""  # such an error begins with the name of its field
        if error := error or (self._media_refusal(request) if message.media or self._hears else ""):
            self.ended.end_early(request, RequestStatus.FINISHED_ERROR, error, field)
        elif message.accepted_token_ids and (status := finish_status(request)):
            self.ended.end_early(request, status)
        elif request.adapter and (self._adapters is None or not self._adapters.serves(request.adapter)):
            self.ended.end_at_limit(request, _NO_ADAPTER, ErrorKind.NO_ADAPTER)
        else:
            self._live.add(request)
            if request.adapter and self._adapters is not None:
                self._adapters.added(request)
            if self._recorder.log_events:
                self._recorder.queued(request)
            if not request.is_constrained or self._constrain(request):
                self.waiting.append(request)
                self._is_stalled = False

    def accept_tokens(self, message: AcceptTokens) -> None:
        """Give a request the tokens that it was added ahead of; for a request that has ended they are ignored."""
        request = self.requests.get(message.request_id)
        if request is None or request.kv.remote is None or not request.kv.remote.awaits_tokens:
            return
        assert self._remote is not None
        self._is_stalled = False
        request.kv.remote.awaits_tokens = False
        is_queued = request.status is RequestStatus.WAITING
        for token_id in message.token_ids:
            request.append_token(token_id)
            self.waiting.num_tokens += is_queued
            if status := finish_status(request):
                if is_queued:
                    self.waiting.remove(request)
                self.ended.end_early(request, status)
                return
        is_parked = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_parked and self._remote.tokens_accepted(request):
            self.waiting.prepend(request)

    def take_rows(self, message: ArrivedRows) -> None:
        """Take rows of an image: requests that waited for the last of them continue. Raises ``ValueError`` for rows of
        another shape than those that were asked for."""
        if self.media is not None:
            self._is_stalled = False
            self._requeue_parked(self.media.arrived(message))

    def reset_rows(self) -> None:
        """Forget the rows of images; requests that have not computed theirs ask again."""
        if self.media is not None:
            self._is_stalled = False
            self.media.reset()

    def lend_request(self, request_id: str, lease_id: bytes, num_bound: int) -> str:
        """Let another engine go on with a running request, as :meth:`.RemoteKV.lend` does. Returns why it stays; empty:
        the next step's output has the lease."""
        request = self.requests.get(request_id)
        if request is None:
            return "it has ended"
        if self._remote is None:
            return "this engine does not exchange KV with others"
        if request.status is not RequestStatus.RUNNING or request.pooling_params is not None:
            return "it waits to run"
        if self.pause_state is PauseState.PAUSED_ALL or self._is_held:
            return "the engine is paused"
        lent = self._remote.lend(request, lease_id, num_bound)
        if isinstance(lent, str):
            return lent
        self.ended.outputs.append(lent)
        return ""

    def requests_to_lend(
        self, count: int, free_tokens: int, stay: Collection[str], *, before_preemption: bool
    ) -> list[str]:
        """Return the ids of up to ``count`` requests that are best lent: those that would be preempted first, or those
        with the most tokens left for the KV that moves with them.

        ``free_tokens``: those of the free blocks where they go. ``stay``: ids of some that cannot be lent.
        """
        if (remote := self._remote) is None:
            return []
        lendable = [
            request for request in reversed(self.running) if remote.may_lend(request) and request.request_id not in stay
        ]
        if not before_preemption:
            lendable.sort(key=lambda each: (each.max_num_tokens - each.num_tokens) / each.num_tokens, reverse=True)
        chosen = list[str]()
        for request in lendable:
            if len(chosen) < count and (room := remote.room_of(request)) <= free_tokens:
                chosen.append(request.request_id)
                free_tokens -= room
        return chosen

    def keep_request(self, request_id: str) -> None:
        """Let a running request that was lent go on here."""
        request = self.requests.get(request_id)
        if request is not None and self._remote is not None and request.status is RequestStatus.RUNNING:
            self._remote.keep(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without an output. Unknown ids are requests that have ended meanwhile. A bug that ending one of
        them meets is logged, and the others end all the same."""
        request_ids = set(request_ids)
        if not request_ids:
            return
        for request_id in request_ids:
            try:
                self._abort(request_id)
            except Exception:
                log.exception("request %s did not end as it should", request_id)
        self._live.drop_ended()
        self.ended.drop_outputs(request_ids)

    def _abort(self, request_id: str) -> None:
        if request := self.requests.get(request_id):
            self._is_stalled = False
            try:
                if request.status in _IN_QUEUE:
                    self.waiting.remove(request)
            finally:  # also if it had not reached the queue, because adding it failed
                self.ended.end(request, RequestStatus.FINISHED_ABORTED)
        elif self._remote is not None:
            self._remote.connector.request_aborted(request_id)

    def abort_all(self) -> None:
        """End every request, with ``FinishReason.ABORT`` as its output."""
        self._is_stalled = False
        for request in list(self.requests.values()):
            if request.status in _IN_QUEUE:
                self.waiting.remove(request)
            self.ended.end_early(request, RequestStatus.FINISHED_ABORTED)
        self._live.drop_ended()

    def set_pause_state(self, state: PauseState) -> None:
        """Choose which requests are planned from now on. During a pause requests are still added and ended."""
        self.pause_state = state
        self._is_stalled = False

    def hold(self, held: bool) -> None:
        """Plan no tokens while ``held``, whatever the pause state: the data-parallel group rests."""
        if held != self._is_held:
            self._is_held = held
            self._is_stalled = False

    @property
    def is_advancing(self) -> bool:
        """Whether a request runs, or was preempted and may run again, in the present pause state."""
        if self._in_flight:
            return True
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        if self.media is not None and self.media.parked and self.media.has_begun:
            return True
        return bool(self.running) or any(request.status is RequestStatus.PREEMPTED for request in self.waiting)

    def has_work(self) -> bool:
        """Return whether a step would do anything; False while every request waits for an external event."""
        if self.ended.outputs or (self._grammars is not None and self._grammars.done):
            return True
        return bool(self.requests) and not self._is_stalled

    def schedule(self) -> SchedulerOutput:
        """Plan a step. It is empty only when no request can run: then :meth:`has_work` is False until that changes."""
        if self._grammars is not None and self._grammars.done:
            self._admit_compiled(self._grammars)
        if not self._is_plain:
            self._begin_step()
        plan = self._planner.plan(PauseState.PAUSED_ALL if self._is_held else self.pause_state)
        self.ended.outputs += plan.early_outputs
        admission = self._planner.admission
        expired, admission.expired = admission.expired, []
        for request in expired:
            self.ended.end_at_limit(request, _EXPIRED, ErrorKind.DEADLINE_EXCEEDED)
        if self._adapters is not None:
            lost, admission.lost = admission.lost, []
            for request in lost:
                self.ended.end_at_limit(request, _NO_ADAPTER, ErrorKind.NO_ADAPTER)
        self._is_stalled = not (plan.num_scheduled_tokens or plan.preempted_req_ids or self._in_flight)
        if self._is_stalled and self.media is not None and self.media.may_get_more:
            self._is_stalled = False
        # An empty plan never reaches the worker, so what the worker has to forget waits for the next step that does.
        if not plan.num_scheduled_tokens:
            self._preempted_req_ids += plan.preempted_req_ids  # the worker learns of them with the next step
            return plan.output()
        plan.finished_req_ids, self.ended.req_ids = self.ended.req_ids, []
        plan.preempted_req_ids[:0], self._preempted_req_ids = self._preempted_req_ids, []
        scheduled = plan.output()
        if self._adapters is not None:
            scheduled.lora_slots = self._adapters.take_slots()
        if self.drafts is not None:
            # After all other planning: drafts take only what the step leaves over, so no request waits or is preempted
            # for them.
            self.drafts.add_to(scheduled, self.running, plan.budget)
        if self._states is not None:
            scheduled.state_runs = self._states.take_runs()
        if self._in_flight is not None:
            # Last of all, because it counts placeholders by the computed tokens that the lines above have just moved.
            self._in_flight.begin(scheduled, self.running)
        return scheduled

    def note_step_time(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Learn how long a step took, before its result is processed."""
        if (share := self._planner.prompt_share) is None:
            return
        counts, drafts, num_prompt_tokens = scheduled.num_scheduled_tokens, scheduled.draft_token_ids, 0
        if scheduled.total_num_scheduled_tokens > len(counts):  # otherwise each row has one token
            num_prompt_tokens = sum(
                count for request_id, count in counts.items() if count > 1 and request_id not in drafts
            )
        share.observe(num_prompt_tokens, seconds, beside_others=1 in counts.values() or bool(drafts))

    def update_from_connector(self, output: KVConnectorOutput) -> None:
        """Process the transfers that ended: requests that waited for them continue, lent blocks become free again."""
        assert self._remote is not None
        self._is_stalled = False
        # Each one goes to the head of its queue; from the last to the first they end up in the order of their arrival.
        for request in reversed(self._remote.update(output)):
            if error := self._remote.failure_of(request):
                self.ended.end_early(request, RequestStatus.FINISHED_ERROR, error)
            else:
                self.waiting.prepend(request)

    def recover_from_failed_step(self, finished_req_ids: Sequence[str] = ()) -> None:
        """Send every request back to waiting, as if the worker had never known any, and forget all cached blocks.

        Blocks can be hit once they are scheduled, so after a failed step it is unknown which of them were written. It
        is also unknown whether the worker forgot the requests that the failed step names in ``finished_req_ids``, and
        which requests it knows from that step and those after it: the next step makes it forget all of them.
        """
        if self._in_flight is not None:
            self._in_flight.abandon(self.requests.values())
        if self.drafts is not None:
            self.drafts.abandon()
        if self._adapters is not None:
            self._adapters.resend_slots()
        # Names that the worker may have forgotten already are harmless to it; one that it keeps would hold a row for
        # ever.
        self.ended.req_ids += finished_req_ids
        self.ended.req_ids += [r.request_id for r in self.requests.values() if r.is_known_to_worker]
        for request in self._live.take_running():
            self._planner.requeue(request, RequestStatus.WAITING)
        for request in self.requests.values():
            if request.status is RequestStatus.PREEMPTED:
                request.set_status(RequestStatus.WAITING)
        if self.media is not None:
            self.media.lose_worker()
        if self._remote is not None:
            self._remote.lose_rows()
            self._remote.lose_hits()
        self.kv.pool.forget_all()

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached blocks. Returns False, and does nothing, while requests run: they would keep caching.

        ``preempt_running`` preempts them first; requests that wait for blocks from other engines compute them, too.
        Blocks leased to other engines remain theirs until the lease ends.
        """
        if (self.running or self._remote) and not preempt_running:
            return False
        self._is_stalled = False
        for request in self._live.take_running():
            self._planner.requeue(request, RequestStatus.PREEMPTED)
            self._preempted_req_ids.append(request.request_id)
        if self._remote is not None:
            self._remote.lose_hits()
            for request in self.waiting:
                self.kv.free(request.kv)  # what it loaded
        self.kv.pool.forget_all()
        return True

    def share_kv(self, identity: bytes) -> None:
        """Say whose cached blocks this engine may use and may give others; see :meth:`KVConnectorScheduler.share`."""
        if self._remote is not None:
            self._remote.connector.share(identity)

    def end_leases(self) -> None:
        """Take back all blocks that are leased to other engines, which then compute them themselves."""
        while self._remote is not None and self._remote.revoke_oldest():
            pass

    def stats(self) -> SchedulerStats:
        """Return the statistics as they are now; counters grow over the scheduler's life."""
        stats = self._recorder.stats(self.waiting, self.running, self.kv.pool)
        if not self._is_plain:
            self._fill_stats(stats)
        if self._grammars is not None:
            stats.num_waiting += len(self._grammars.compiling)
        if self._remote is not None:
            self._remote.fill_stats(stats)
        if self.drafts is not None:
            stats.spec_decoding = self.drafts.stats()
        return stats

    def _media_refusal(self, request: Request) -> str:
        if self.media is None:
            return "this model reads text only"
        if not request.kv.media:
            return "this model writes down sound: the prompt needs exactly one, beside its tokens"
        return self.media.refusal(request, self._most_tokens)

    def _begin_step(self) -> None:
        """Let what images and states need happen before a step is planned."""
        if self.media is not None and self.media.may_get_more:
            self._requeue_parked(self.media.share_out())
        if self._states is not None:
            self._states.begin_step()

    def _fill_stats(self, stats: SchedulerStats) -> None:
        """Add the figures of images and states."""
        if (states := self._states) is not None:
            stats.preempted_states = dict(states.preempted)
            # A slot for each request that runs or loads, and for each lease. What the last step read or wrote is held a
            # step longer.
            num_held = len(self.running) + (0 if self._remote is None else self._remote.num_holders)
            stats.num_free_state_slots = states.pool.num_blocks - num_held
            stats.kv_usage = max(stats.kv_usage, num_held / states.pool.num_blocks)
        if self.media is not None and self.media.num_asked:
            self.media.fill_stats(stats)

    def _requeue_parked(self, requests: Sequence[Request]) -> None:
        """Let requests that waited for rows begin before others, in the order in which they waited."""
        for request in reversed(requests):
            self.waiting.prepend(request)

    def _constrain(self, request: Request) -> bool:
        """Return whether a constrained request may be queued now; otherwise it waits for its grammar or has ended."""
        if self._grammars is None:
            error = f"{FIELD}: this engine has no tokenizer to constrain its output by"
            self.ended.end_early(request, RequestStatus.FINISHED_ERROR, error, FIELD)
            return False
        try:
            if error := self._grammars.constrain(request):
                self.ended.end_early(request, RequestStatus.FINISHED_ERROR, error)
        except CompileQueueFull as full:
            kind = ErrorKind.TENANT_FULL if full.is_tenants else ErrorKind.ENGINE_FULL
            self.ended.end_at_limit(request, str(full), kind)
        return request.status is RequestStatus.WAITING

    def _admit_compiled(self, grammars: StructuredOutputManager) -> None:
        """Move requests whose grammar has compiled into the waiting queue."""
        for compiled in grammars.take_compiled():
            request = self.requests[compiled.request_id]
            if compiled.error:
                self.ended.end_early(request, RequestStatus.FINISHED_ERROR, compiled.error, compiled.field)
                self.ended.outputs[-1].error_kind = compiled.kind
            else:
                request.set_status(RequestStatus.WAITING)
                self.waiting.append(request)


def _check_config(config: SchedulerConfig, max_model_len: int) -> None:
    """Raise ``ValueError``, naming the setting, for limits under which the scheduler could stop making progress."""
    if config.max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {config.max_num_seqs}; it must be at least 1")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: "
            "a step could not serve every running request"
        )
    if config.long_prefill_token_threshold < 0:
        raise ValueError(
            f"long_prefill_token_threshold is {config.long_prefill_token_threshold}; it must be positive, or 0 for no "
            "limit"
        )
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        raise ValueError("long_prefill_token_threshold needs chunked prefill")
    if not 0 <= config.watermark < 1:
        raise ValueError(f"watermark is {config.watermark}; it must be a share of the blocks: at least 0 and below 1")
    if config.prefill_tokens_beside_decode is not None and config.prefill_tokens_beside_decode < 1:
        raise ValueError(
            f"prefill_tokens_beside_decode is {config.prefill_tokens_beside_decode}; it must be at least 1"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens ({config.max_num_batched_tokens}) "
            f"must reach max_model_len ({max_model_len})"
        )


def _refusal(request: Request, kv: KVManager, max_model_len: int, *, moves_kv: bool) -> str:
    """Return why a request can never run; empty if it can."""
    if request.kv.remote is not None and not moves_kv:
        return "this engine does not exchange KV with others"
    if not request.num_prompt_tokens:
        return "prompt is empty"
    if request.num_prompt_tokens >= max_model_len and request.pooling_params is None:
        return (
            f"prompt has {request.num_prompt_tokens} tokens; "
            f"with at least one of output the context holds {max_model_len}"
        )
    # The last token's KV is never computed.
    if request.max_num_tokens - 1 > kv.num_slots:
        return f"prompt and max_tokens need {request.max_num_tokens - 1} KV slots; the engine has {kv.num_slots}"
    return ""
