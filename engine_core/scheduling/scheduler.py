"""Decides what each step computes: a token budget spent on letting every request catch up with its tokens."""

import time
from collections.abc import Callable, Iterable

from ..config import CacheConfig, SchedulerConfig
from ..control.pausing import PauseState
from ..kv_cache.kv_cache_config import KVCacheConfig
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.kv_events import KVEventLog
from ..kv_transfer.kv_connector import KVConnectorOutput, KVConnectorScheduler
from ..kv_transfer.remote_kv import RemoteKV
from ..structured_output.manager import FIELD, StructuredOutputManager
from ..wire.messages import AcceptTokens, EngineCoreOutput, EngineCoreRequest, SchedulerStats
from ..wire.scheduler_output import ModelRunnerOutput, SchedulerOutput
from .constrained_requests import NO_CHOICE, ConstrainedRequests
from .prompt_logprobs import collect_prompt_logprobs
from .request import Request, RequestStatus, finish_status, mark_finished
from .request_limits import check_config, refusal
from .request_queue import SchedulingPolicy, make_queue
from .stats_recorder import StatsRecorder
from .step_planner import StepPlanner
from .steps_in_flight import StepsInFlight


class Scheduler:
    """In the order of its policy; running before waiting, preemption from the tail.

    ``schedule`` and ``update_from_output`` alternate; requests are added and aborted between steps. No step costs time
    in proportion to the length of a sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_cache: KVCacheConfig,
        clock: Callable[[], int] = time.monotonic_ns,
        *,
        connector: KVConnectorScheduler | None = None,
        kv_policy: str = "recompute",
        grammars: StructuredOutputManager | None = None,
    ) -> None:
        """``connector``: brings KV from elsewhere, offers it to others; ``kv_policy``: ``KVConfig.policy``;
        ``grammars``: of structured outputs, which are refused without."""
        check_config(config, kv_cache.max_model_len)
        self.config = config
        self.max_model_len = kv_cache.max_model_len
        self.kv_events = KVEventLog(cache.block_size) if cache.kv_events else None
        self.kv = KVCacheManager.of(cache, kv_cache.num_blocks, self.kv_events)
        self.requests: dict[str, Request] = {}
        self._policy = SchedulingPolicy(config.policy)
        self.waiting = make_queue(self._policy)
        self._remote = RemoteKV(connector, self.kv, kv_policy, clock) if connector is not None else None
        self.constrained = ConstrainedRequests(grammars)
        self.pause_state = PauseState.UNPAUSED
        self._is_stalled = False
        self._in_flight = StepsInFlight() if config.async_scheduling else None
        self._clock = clock
        self._recorder = StatsRecorder(clock, cache, config)
        self._planner = StepPlanner(config, self.waiting, self.kv, self._remote, self._recorder)
        self.running = self._planner.running
        self._finished_req_ids: list[str] = []
        self._preempted_req_ids: list[str] = []
        self._early_outputs: list[EngineCoreOutput] = []

    # Arrival and departure

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queues a request, or ends it at once: refused, or its accepted tokens meet an end condition."""
        assert message.request_id not in self.requests, f"request {message.request_id} is live already"
        request = Request(message, self.max_model_len, message.arrival_ns or self._clock())
        self._is_stalled = False
        moves_kv = self._remote is not None
        if error := refusal(request, self._policy, self.kv, self.max_model_len, moves_kv=moves_kv):
            self._finish_early(request, RequestStatus.FINISHED_ERROR, error)
        elif status := finish_status(request):
            self._finish_early(request, status)
        else:
            self.requests[request.request_id] = request
            self._recorder.queued(request)
            if request.sampling_params.structured_output is None:
                self.waiting.append(request)
            elif refused := self.constrained.wait(request):
                self._finish_early(request, RequestStatus.FINISHED_ERROR, refused.error, refused.field)

    def accept_tokens(self, message: AcceptTokens) -> None:
        """Gives a request the tokens that it was added ahead of. Of an unknown id they are too late."""
        request = self.requests.get(message.request_id)
        if request is None or request.remote is None or not request.remote.awaits_tokens:
            return
        assert self._remote is not None
        self._is_stalled = False
        request.remote.awaits_tokens = False
        is_queued = request.status is RequestStatus.WAITING
        for token_id in message.token_ids:
            request.append_token(token_id)
            self.waiting.note_growth(is_queued)
            if status := finish_status(request):
                if is_queued:
                    self.waiting.remove(request)
                self._finish_early(request, status)
                return
        is_parked = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_parked and self._remote.tokens_accepted(request):
            self.waiting.prepend(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output. Unknown ids are those that ended meanwhile."""
        request_ids = set(request_ids)
        if not request_ids:
            return
        self._is_stalled = False
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    self.waiting.remove(request)
                self._finish(request, RequestStatus.FINISHED_ABORTED)
            elif self._remote is not None:
                self._remote.connector.request_aborted(request_id)
        self.running[:] = [request for request in self.running if not request.is_finished]
        self._early_outputs = [output for output in self._early_outputs if output.request_id not in request_ids]
        self._recorder.forget(request_ids)

    def abort_all(self) -> None:
        """Ends every request with ``FinishReason.ABORT`` as its output."""
        self._is_stalled = False
        for request in list(self.requests.values()):
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                self.waiting.remove(request)
            self._finish_early(request, RequestStatus.FINISHED_ABORTED)
        self.running.clear()

    def set_pause_state(self, state: PauseState) -> None:
        """What is to be planned from now on. Paused, requests are taken in and ended as ever."""
        self.pause_state = state
        self._is_stalled = False

    @property
    def is_advancing(self) -> bool:
        """Whether anybody runs, or was preempted and may run again, in the present pause state."""
        if self._in_flight:
            return True
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return bool(self.running) or any(request.status is RequestStatus.PREEMPTED for request in self.waiting)

    def has_work(self) -> bool:
        """Whether a step would do anything. Not while every request waits for what only others can bring."""
        if self._early_outputs or self.constrained.has_news():
            return True
        return bool(self.requests) and not self._is_stalled

    def take_early_outputs(self) -> list[EngineCoreOutput]:
        """Outputs of requests that ended without a step."""
        outputs, self._early_outputs = self._early_outputs, []
        self._recorder.tell(outputs)
        return outputs

    # A step

    def schedule(self) -> SchedulerOutput:
        """Plans a step. It is empty only when no request can run: then :meth:`has_work` is false until news come."""
        if self.constrained.has_news():
            self._admit_compiled()
        plan = self._planner.plan(self.pause_state)
        self._early_outputs += plan.early_outputs
        if plan.num_scheduled_tokens:
            # Without a step the worker hears of these with the next one.
            plan.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
            plan.preempted_req_ids[:0], self._preempted_req_ids = self._preempted_req_ids, []
        else:
            self._preempted_req_ids += plan.preempted_req_ids
            self._is_stalled = not plan.preempted_req_ids
        scheduled = plan.output()
        if self._in_flight is not None and plan.num_scheduled_tokens:
            self._in_flight.begin(scheduled, self.running)
        return scheduled

    def end_constrained(self, ended: dict[str, str], field: str = FIELD) -> None:
        """Ends requests whose text is complete with no token to say so, or, with an error, cannot go on."""
        for request_id, error in ended.items():
            if (request := self.requests.get(request_id)) is None:
                continue  # aborted while the step executed
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:  # preempted while the step was in flight
                self.waiting.remove(request)
            if error:
                self._finish_early(request, RequestStatus.FINISHED_ERROR, error, field)
            else:
                self._finish_early(request, RequestStatus.FINISHED_STOPPED)

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Takes in what the step computed; returns what it produced, one output for each request with new tokens."""
        outputs: list[EngineCoreOutput] = []
        any_finished = False
        assert len(result.req_ids) == len(scheduled.num_scheduled_tokens), "the worker left requests out"
        if self._in_flight is not None:
            self._is_stalled = False
            result = self._in_flight.end(result, self.requests)
        prompt_logprobs = collect_prompt_logprobs(self.requests, scheduled, result) if result.prompt_logprobs else {}
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if (request := self.requests.get(request_id)) is None:
                continue  # aborted while the step executed
            if token_ids:
                output = self._accept_tokens(request, token_ids)
                any_finished |= output.finish_reason is not None
                outputs.append(output)
        if result.logprobs or prompt_logprobs:
            for output in outputs:
                output.new_logprobs = result.logprobs.get(output.request_id)
                output.new_prompt_logprobs = prompt_logprobs.get(output.request_id)
        if any_finished:
            self.running[:] = [request for request in self.running if not request.is_finished]
        if result.num_nans_in_logits:
            for output in outputs:
                output.num_nans_in_logits = result.num_nans_in_logits.get(output.request_id, 0)
        if result.without_choice:
            self.end_constrained(dict.fromkeys(result.without_choice, NO_CHOICE), "allowed_token_ids")
        self._recorder.tell(outputs)
        return outputs

    def update_from_connector(self, output: KVConnectorOutput) -> None:
        """Takes in what became of transfers: requests that waited go on, blocks that others read are free again."""
        assert self._remote is not None
        self._is_stalled = False
        for request in reversed(self._remote.update(output)):
            if error := self._remote.failure_of(request):
                self._finish_early(request, RequestStatus.FINISHED_ERROR, error)
            else:
                self.waiting.prepend(request)

    def recover_from_failed_step(self) -> None:
        """Sends every request back to waiting, as if the worker had never known any, and forgets all cached blocks.

        Blocks can be hit once they are scheduled, so after a step that failed nothing tells which of them were written.
        """
        if self._in_flight is not None:
            self._in_flight.abandon(self.requests.values())
            # Steps behind the one that failed have run, and the worker may know requests again.
            self._finished_req_ids += [r.request_id for r in self.requests.values() if r.is_known_to_worker]
            self._is_stalled = False
        for request in reversed(self.running):
            self._planner.requeue(request, RequestStatus.WAITING)
        self.running.clear()
        for request in self.requests.values():
            if request.status is RequestStatus.PREEMPTED:
                request.set_status(RequestStatus.WAITING)
        if self._remote is not None:
            self._remote.lose_rows()
            self._remote.lose_hits()
        self.kv.pool.forget_all()

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forgets all cached blocks; False, and nothing happens, while requests run: they would go on caching.

        ``preempt_running`` sends those back to waiting first, to be computed anew; who waits for blocks from elsewhere
        computes them too. Blocks leased to others stay theirs until the lease ends.
        """
        if (self.running or self._remote) and not preempt_running:
            return False
        self._is_stalled = False
        for request in reversed(self.running):
            self._planner.requeue(request, RequestStatus.PREEMPTED)
            self._preempted_req_ids.append(request.request_id)
        self.running.clear()
        if self._remote is not None:
            self._remote.lose_hits()
            for request in self.waiting:
                self.kv.free(request)  # what it loaded
        self.kv.pool.forget_all()
        return True

    def end_leases(self) -> None:
        """Takes back what is held for other engines; they compute it themselves."""
        while self._remote is not None and self._remote.revoke_oldest():
            pass

    def stats(self) -> SchedulerStats:
        """As it is now; counters grow over the scheduler's life."""
        stats = self._recorder.stats(self.waiting, self.running, self.kv.pool)
        stats.num_waiting += self.constrained.num_waiting
        if self._remote is not None:
            self._remote.fill_stats(stats)
        return stats

    def _admit_compiled(self) -> None:
        """Whose grammar is there waits from now on like any other."""
        self._is_stalled = False
        for compiled in self.constrained.take_compiled():
            request = self.requests[compiled.request_id]
            if compiled.error:
                self._finish_early(request, RequestStatus.FINISHED_ERROR, compiled.error, compiled.field)
            else:
                request.set_status(RequestStatus.WAITING)
                self.waiting.append(request)

    # Parts of update_from_output() and add_request()

    def _accept_tokens(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        output = EngineCoreOutput(request.request_id, token_ids, request.num_tokens - request.num_prompt_tokens)
        for count, token_id in enumerate(token_ids, 1):
            request.append_token(token_id)
            if status := finish_status(request):
                output.new_token_ids = token_ids[:count]
                mark_finished(output, request, status)
                break
        if request.status is RequestStatus.PREEMPTED:  # while the step was in flight
            self.waiting.note_growth(len(output.new_token_ids))
            if status is not None:
                self.waiting.remove(request)
        if status is not None:
            self._finish(request, status)
        if not request.first_output_sent:
            request.first_output_sent = True
            output.prefill_stats = self._recorder.prefill_stats(request)
            output.kv_wait_ns = request.kv_wait_ns
        return output

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Ends a request; the caller takes it out of ``running`` or ``waiting``."""
        if request.is_known_to_worker:
            self._finished_req_ids.append(request.request_id)
        request.set_status(status)
        if self._in_flight is not None:
            self._in_flight.request_ended(request.request_id)
        if self._remote is None or not self._remote.request_finished(request):
            self.kv.free(request)
        self.requests.pop(request.request_id, None)
        self.constrained.finished(request)

    def _finish_early(self, request: Request, status: RequestStatus, error: str = "", field: str = "") -> None:
        """Ends a request without a step; it is in no queue. ``field``: of the request, that is at fault."""
        output = EngineCoreOutput(request.request_id, [], request.num_output_tokens, error=error, error_field=field)
        self._finish(request, status)
        mark_finished(output, request, status)
        self._early_outputs.append(output)
