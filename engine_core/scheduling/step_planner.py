"""Fills a step: who runs goes on, then the waiting begin, as far as tokens, rows and blocks reach."""

import bisect

from ..config import SchedulerConfig
from ..control.pausing import PauseState
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_transfer.remote_kv import RemoteKV
from .request import Request, RequestStatus
from .request_queue import RequestQueue, SchedulingPolicy, priority_key
from .stats_recorder import StatsRecorder
from .step_plan import StepPlan
from .token_budget import TokenBudget
from .waiting_admission import Admission


class StepPlanner:
    """Moves requests between ``running`` and the queue; the last of the running are preempted first."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: RequestQueue,
        kv: KVCacheManager,
        remote: RemoteKV | None,
        recorder: StatsRecorder,
    ) -> None:
        self.running: list[Request] = []
        """In the order of the policy, like ``waiting``; changed in place only."""
        self._waiting = waiting
        self._kv = kv
        self._remote = remote
        self._recorder = recorder
        self._max_num_seqs = config.max_num_seqs
        self._by_priority = SchedulingPolicy(config.policy) is SchedulingPolicy.PRIORITY
        self._budget = TokenBudget(config)
        self._admission = Admission(waiting, kv, remote, config)

    def plan(self, pause_state: PauseState) -> StepPlan:
        """Empty when nobody can run."""
        budget = self._budget.of_step(self.running, len(self._waiting))
        plan = StepPlan(0 if pause_state is PauseState.PAUSED_ALL else budget)
        self._plan_running(plan)
        if not plan.preempted_req_ids:
            self._plan_waiting(plan, only_begun=pause_state is not PauseState.UNPAUSED)
        return plan

    def requeue(self, request: Request, status: RequestStatus) -> None:
        """Takes the blocks of a request, which the caller takes out of ``running``, back: it waits again."""
        if self._remote is not None:
            self._remote.connector.request_preempted(request)
        self._kv.free(request)
        request.set_status(status)
        if status is RequestStatus.PREEMPTED:
            self._recorder.preempted(request)
        self._waiting.prepend(request)

    def _plan_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and plan.budget > 0:
            request = self.running[index]
            if request.num_output_placeholders and request.will_be_full:
                index += 1
                continue
            num_after = len(self.running) - index - 1  # each of whom gets a token
            num_new_tokens = self._budget.chunk(request, plan.budget - num_after)
            new_block_ids = self._kv.allocate(request, num_new_tokens)
            if new_block_ids is None and (new_block_ids := self._make_room(request, num_new_tokens, plan)) is None:
                break
            plan.add_running(request, num_new_tokens, new_block_ids)
            index += 1

    def _make_room(self, request: Request, num_new_tokens: int, plan: StepPlan) -> list[int] | None:
        """Allocates at the cost of leases first, then of the tail of the running; None if that was itself."""
        while True:
            if self._remote is None or not self._remote.revoke_oldest():
                victim = self.running.pop()
                self.requeue(victim, RequestStatus.PREEMPTED)
                plan.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return None
            if (new_block_ids := self._kv.allocate(request, num_new_tokens)) is not None:
                return new_block_ids

    def _plan_waiting(self, plan: StepPlan, *, only_begun: bool) -> None:
        while plan.budget > 0 and len(self.running) < self._max_num_seqs:
            request = self._admission.next(plan.budget, others_run=bool(self.running), only_begun=only_begun)
            if request is None:
                break
            self._start(request, plan)

    def _start(self, request: Request, plan: StepPlan) -> None:
        num_new_tokens = self._budget.chunk(request, plan.budget)
        if self._remote is not None:
            plan.early_outputs += self._remote.starts(request, num_new_tokens)
        new_block_ids = self._kv.allocate(request, num_new_tokens)
        assert new_block_ids is not None, "an admitted request has room"
        if self._by_priority:
            bisect.insort(self.running, request, key=priority_key)
        else:
            self.running.append(request)
        self._recorder.started(request)
        if request.status is RequestStatus.PREEMPTED:
            plan.add_resumed(request, num_new_tokens)
        else:
            plan.add_new(request, num_new_tokens)
        request.set_status(RequestStatus.RUNNING)
