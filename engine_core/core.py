"""The engine's loop without I/O."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from .control.pausing import Pausing
from .control.sessions import Sessions
from .control.sleeping import Sleeping
from .control.step_watchdog import StepWatchdog
from .core_ready import check_states, core_ready, encoder_config, parallel_config_hash, parallel_facts
from .data.config import EngineConfig
from .data.errors import ExecutorFailedError, WeightsDamagedError
from .data.handshake import WarmUp
from .data.kv_groups import KVCacheConfig
from .data.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, ExpertLoads, SchedulerStats
from .data.model_info import ModelInfo
from .data.scheduler_output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from .executor.executor import Executor, PoolSpec, WorkerAdapters
from .kv_cache.kv_cache_size import has_waves, size_kv_cache
from .kv_transfer.core_kv import CoreKV
from .kv_transfer.kv_connector import StepTransfers, take_updates
from .scheduling.adapters import Adapters
from .scheduling.media_rows import RowStore
from .scheduling.scheduler import Scheduler
from .scheduling.step_reports import IterationLog, StepBill, StepTraces, as_observer, dump_failed_step
from .structured_output.manager import GrammarStep, StructuredOutputManager


class StepInFlight(NamedTuple):
    """Holds a step that the executor has begun, with its KV transfers and its future result."""

    scheduled: SchedulerOutput
    transfers: StepTransfers | None
    pending: PendingOutput


def take_oldest(steps: deque[StepInFlight]) -> tuple[StepInFlight, ModelRunnerOutput]:
    """Wait for the oldest step, remove it and return it with its result. Raises the error of the step.

    The step stays if an interrupt ends the waiting, because it still runs.
    """
    oldest = steps[0]
    try:
        # Removed only afterwards: a step that was taken out first was lost when Ctrl-C arrived while its result was
        # awaited, and each later result was applied to the wrong step.
        result = oldest.pending.result()
    except Exception:
        steps.popleft()
        raise
    steps.popleft()
    return oldest, result


def drain(steps: deque[StepInFlight]) -> None:
    """Wait for all steps and drop their results and errors."""
    while steps:
        with contextlib.suppress(Exception):
            take_oldest(steps)


# A worker that hangs, or whose device failed, was noticed only when a request was lost. The front asks every 10 s and
# waits for 60, as long as the coordinator waits for a step.
_HEALTH_SECONDS = 30.0
"""How long workers may take to answer a health check; they answer after the steps that have begun."""


class EngineCore:
    """Joins a scheduler and an executor. Used from one thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        kv: CoreKV | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        watchdog: StepWatchdog | None = None,
    ) -> None:
        """Load the model and size the KV cache.

        Raises ``ValueError`` naming a setting or a feature of the model that does not work. ``kv`` moves KV blocks in
        and out of the pool, if given. ``clock`` returns nanoseconds. ``watchdog`` shows how far the step in work is.
        """
        self.executor = executor
        self._kv = kv
        self._connector = kv.connector if kv is not None else None
        model = executor.load_model()
        check_states(config, model)
        if model.media is not None and model.media.cross_rows:
            config.check_cross()
        self.adapters = Adapters(config.lora, WorkerAdapters(executor)) if config.lora.enable else None
        # An encoder's prompt cannot be cut into chunks and its blocks hold no bytes, so the sizes below follow other
        # rules.
        if model.pooling.is_encoder:
            config = encoder_config(config, model.max_model_len)
        kv_cache = size_kv_cache(config, model, executor.determine_available_memory)
        self._grammars: StructuredOutputManager | None = None
        if config.structured_output is not None:
            self._grammars = StructuredOutputManager(config.structured_output, model.vocab_size, config.reasoning)
        self.scheduler = Scheduler(
            config,
            kv_cache,
            clock,
            connector=self._connector,
            grammars=self._grammars,
            adapters=self.adapters,
            pooling=model.pooling,
            media=RowStore.of_model(config.scheduler, model),
        )
        self.sessions = Sessions(self.scheduler)
        self.pausing = Pausing(self.scheduler)
        self.sleeping = Sleeping(self.scheduler, self.pausing, executor)
        warm_up = self._initialize_kv_cache(config, kv_cache, model)
        if self.scheduler.drafts is not None:
            self.scheduler.drafts.free_rows = warm_up.free_rows or None
        self._watchdog = watchdog or StepWatchdog(clock=lambda: clock() / 1e9)
        self._watchdog.warmed_up(warm_up.seconds)
        self.steps_in_flight: deque[StepInFlight] = deque()
        """Steps that the executor has begun and whose results are not processed yet, oldest first."""
        most = executor.max_concurrent_batches if self.scheduler.overlaps else 1
        # Loads planned with a step wait for one step before it, not for several.
        self._max_in_flight = min(most, 2) if self._connector is not None else most
        self._unsampled: tuple[SchedulerOutput, StepTransfers | None] | None = None
        """A step whose second half has not begun, because its grammars need the tokens of the step before it."""
        self._observability = config.observability
        self._traces = StepTraces(self.scheduler.requests, clock) if config.observability.trace_steps else None
        if self._traces is not None:  # in its place, so that a core without traces makes no further call
            self.scheduler.schedule = self._traces.timed(self.scheduler.schedule)  # type: ignore[method-assign]
        self._bill = StepBill(self.scheduler.requests) if config.observability.bill else None
        iterations = IterationLog() if config.observability.log_iterations else None
        self._observer = as_observer(iterations, self._traces, self._bill)
        self._expert_loads: ExpertLoads | None = None
        self.num_steps = 0
        self.num_begun = 0
        """Forward passes that were begun."""
        self.has_waves = has_waves(config, model)
        """Whether it computes in waves with the other ranks of its data-parallel group."""
        config.check_core_place()
        self.damage: WeightsDamagedError | None = None
        """Set once a check of the workers has found damaged weights: a core in a process of its own ends then."""
        self.num_requests_added = 0
        """Requests that clients added, refused ones included."""
        self.ready = core_ready(config, model, kv_cache, warm_up, self.adapters, has_waves=self.has_waves)
        self.parallel_facts: dict[str, str] = {}
        """What the other ranks of the data-parallel group must share; empty: there is no group."""
        if config.parallel.group_id:
            self.parallel_facts = parallel_facts(config, self.ready)
            self.ready.parallel_config_hash = parallel_config_hash(self.parallel_facts)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, or an input of a session; it may end at once, with an output in the next step.

        Raises ``ValueError`` for an input that a session cannot have.
        """
        if request.packed_prompt:
            request.prompt_token_ids, request.packed_prompt = request.listed_prompt(), b""
        if request.resumable or request.request_id in self.sessions.live:
            self.sessions.add(request)
        else:
            self.scheduler.add_request(request)
        if request.is_traced and self._traces is not None:
            self._traces.add(request.request_id)
        if self._bill is not None:
            self._bill.add(request.request_id, request.tenant)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without an output; ids that are not live are ignored."""
        self._abort(request_ids)
        if self.adapters is not None:
            self.adapters.drop_unneeded()
        self.settle_pause()

    def has_work(self) -> bool:
        """Return whether ``step`` would do anything.

        It would not while every request waits for KV or a grammar; ``on_update`` reports when they arrive.
        """
        scheduler = self.scheduler
        if self.steps_in_flight or scheduler.has_work():
            return True
        if scheduler.kv_events is not None and scheduler.kv_events.events:
            return True
        return self._connector is not None and self._connector.has_updates()

    def has_requests(self) -> bool:
        """Return whether any request is live."""
        return bool(self.scheduler.requests)

    def is_compiling(self) -> bool:
        """Return whether a request waits for its grammar."""
        return self._grammars is not None and bool(self._grammars.compiling)

    def on_update(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from any thread, when there may be work that no call to this core brought."""
        if self._connector is not None:
            self._connector.on_update(callback)
        if self._grammars is not None:
            self._grammars.on_update(callback)

    def step(self, take_aborts: Callable[[], Iterable[str]] = tuple) -> EngineCoreOutputs:
        """Run one turn of the loop: schedule a step, execute it, update the requests from the oldest result.

        ``take_aborts`` returns the requests that were aborted while a step executed.
        """
        scheduled = self.scheduler.schedule()
        transfers = StepTransfers(self._connector, scheduled) if self._connector is not None else None
        outputs: list[EngineCoreOutput] = []
        if self.scheduler.ended.outputs:
            # Among them is what an interrupted step brought, which precedes this step's tokens.
            outputs = self.scheduler.ended.take_outputs()
        try:
            if (ended := self._execute(scheduled, transfers)) is not None:
                outputs += self._update(*ended, take_aborts)
            if self._unsampled is not None:
                self._sample_deferred(*self._unsampled)
        except BaseException as error:  # interrupts from the keyboard included: the offline API continues after them
            self._recover(error, scheduled, outputs)
            raise
        # After the step's own results, which name requests that the transfers below may end or let continue.
        if self._connector is not None and (transfers_ended := take_updates(self._connector, scheduled)) is not None:
            self.scheduler.update_from_connector(transfers_ended)
        if self.scheduler.ended.outputs:
            outputs += self.scheduler.ended.take_outputs()
        try:
            self._settle(outputs)
        except BaseException:
            self.scheduler.ended.outputs[:0] = outputs  # the next step returns them
            raise
        return self._report(outputs)

    def _execute(
        self, scheduled: SchedulerOutput, transfers: StepTransfers | None
    ) -> tuple[StepInFlight, ModelRunnerOutput] | None:
        """Begin a step; wait for the oldest one if no other can begin before it has ended, and return its result.

        Afterwards no step before this one runs, so that its loads may fill blocks which those used.
        """
        if transfers is not None and not self.steps_in_flight:
            transfers.start_loads()
        try:
            if scheduled.total_num_scheduled_tokens:
                self._begin(scheduled, transfers)
                if self._unsampled is None and len(self.steps_in_flight) < self._max_in_flight:
                    return None
            return take_oldest(self.steps_in_flight) if self.steps_in_flight else None
        finally:
            if transfers is not None:
                transfers.start_loads()

    def _begin(self, scheduled: SchedulerOutput, transfers: StepTransfers | None) -> None:
        """Begin both halves of a step. The bitmasks of grammars are computed while the model runs.

        Only the first half begins where a bitmask depends on a token that is still in flight.
        """
        if self._observer is not None:
            self._observer.begin()
        masks, requests = None, self.scheduler.requests
        if self._grammars is not None and self._grammars.live:
            if self._grammars.awaits_tokens(scheduled, requests):
                # The forward pass need not wait for the token in flight, only the sampling does: constrained requests
                # overlap too.
                self._unsampled = scheduled, transfers
            else:
                masks = self._start_masks(scheduled)
        self._watchdog.began(scheduled.total_num_scheduled_tokens)
        self.num_begun += 1
        try:
            self.executor.execute_model(scheduled)
        finally:
            if masks is not None:
                masks.output()  # the thread must be idle even if the model failed
        if self._unsampled is None:
            self.steps_in_flight.append(StepInFlight(scheduled, transfers, self._sample(masks)))

    def _start_masks(self, scheduled: SchedulerOutput) -> GrammarStep | None:
        assert self._grammars is not None
        scheduler = self.scheduler
        known = scheduler.drafts.known(scheduled) if scheduler.drafts is not None else None
        return self._grammars.start_step(scheduled, scheduler.requests, known)

    def _sample(self, masks: GrammarStep | None) -> PendingOutput:
        if masks is None:
            return self.executor.sample_tokens(None)
        pending = self.executor.sample_tokens(masks.output())
        self.scheduler.results.end_constrained(masks.ended)
        return pending

    def _sample_deferred(self, scheduled: SchedulerOutput, transfers: StepTransfers | None) -> None:
        """Begin the second half of a step, after the token before it became known."""
        self._unsampled = None
        masks = self._start_masks(scheduled)
        self.steps_in_flight.append(StepInFlight(scheduled, transfers, self._sample(masks)))

    def _recover(self, error: BaseException, scheduled: SchedulerOutput, outputs: list[EngineCoreOutput]) -> None:
        """Report a failed step, wait for the others in flight, and let every request begin anew, as if the worker had
        never known any.

        The next step returns ``outputs``. An interrupt ends the waiting: the steps left still run before later ones,
        and their results are dropped.
        """
        scheduler = self.scheduler
        try:
            if isinstance(error, Exception) and not isinstance(error, WeightsDamagedError):  # which no step caused
                dump_failed_step(self._observability, error, scheduled, scheduler.requests, scheduler.stats())
            drain(self.steps_in_flight)  # the first failure is the one to report
            if self._grammars is not None:
                self._grammars.wait_for_masks()
        finally:
            self._begin_anew(scheduled.finished_req_ids)
            scheduler.ended.outputs[:0] = outputs

    def _begin_anew(self, finished_req_ids: Sequence[str] = ()) -> None:
        """Forget the steps in flight, and let every request begin anew."""
        self.steps_in_flight.clear()
        self._unsampled = None
        self._watchdog.failed()
        if self._observer is not None:
            self._observer.abandon()
        self.scheduler.recover_from_failed_step(finished_req_ids)

    def _update(
        self, step: StepInFlight, result: ModelRunnerOutput, take_aborts: Callable[[], Iterable[str]]
    ) -> list[EngineCoreOutput]:
        # First, so that the time of a step does not hold what the core does with its results.
        self.scheduler.note_step_time(step.scheduled, self._watchdog.ended())
        if step.transfers is not None:
            # As soon as the step has ended: a reader on another engine waits for these tokens.
            step.transfers.step_ended()
        # Before the results are applied: no token of an aborted request leaves, and its blocks are free for the next
        # step.
        self._abort(take_aborts())
        self.num_steps += 1
        self._expert_loads = result.expert_loads
        if self._observer is not None:
            self._observer.end(self.num_steps, step.scheduled, result)
        outputs = self.scheduler.results.apply(step.scheduled, result)
        if result.draft_token_ids or self.scheduler.drafts is not None:
            self.post_step(result)
        return outputs

    def post_step(self, result: ModelRunnerOutput) -> None:
        """Pass on what the worker drafted for the next step."""
        assert self.scheduler.drafts is not None, "the worker proposes drafts, but the engine does not speculate"
        self.scheduler.drafts.propose(result.draft_token_ids)

    def _settle(self, outputs: list[EngineCoreOutput]) -> None:
        """Drop adapters that only ended requests needed; let sessions, and pauses and sleep that wait for running
        requests, continue."""
        if self.adapters is not None:
            self.adapters.drop_unneeded()
        if self.sessions.live:
            self.sessions.take(outputs)
        self.settle_pause()

    def settle_pause(self) -> None:
        """Let pauses and sleep continue that wait for running requests."""
        if self.pausing.quiet is not None:
            self.pausing.settle()
        if self.sleeping.is_settling:
            self.sleeping.settle()

    def _report(self, outputs: list[EngineCoreOutput]) -> EngineCoreOutputs:
        kv_events, media = self.scheduler.kv_events, self.scheduler.media
        return EngineCoreOutputs(
            step=self.num_steps,
            outputs=outputs,
            scheduler_stats=self.scheduler.stats() if self.adapters is None else self.stats(),
            kv_events=kv_events.take() if kv_events is not None else [],
            num_requests_added=self.num_requests_added,
            expert_loads=self._expert_loads,
            rows_wanted=media.take_wanted() if media is not None and media.wanted else [],
            step_spans=self._traces.take_ended(outputs) if self._traces is not None else {},
            cpu_ns=self._bill.report(outputs) if self._bill is not None else {},
        )

    def _abort(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort_requests(self.sessions.abort(request_ids) if self.sessions.live else request_ids)

    def pause(self, mode: str = "abort", clear_cache: bool = False) -> "Future[None]":
        """Pause; the future is done once no request runs. See :meth:`Pausing.pause`."""
        quiet = self.pausing.pause(mode, clear_cache=clear_cache)
        self.settle_pause()
        return quiet

    def resume(self) -> None:
        """Resume after a pause; do nothing if not paused. Raises ``ValueError`` while asleep."""
        if self.sleeping.is_sleeping():
            raise ValueError("the engine is asleep; call wake_up first")
        self.pausing.resume()

    def calls_to_run(self) -> str:
        """Return why a new request would not run, and which call lets it, as a sentence; empty if it would."""
        if sentence := self.sleeping.calls_to_wake():
            return sentence
        return "the engine is paused; call resume first" if self.pausing.is_paused else ""

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached blocks. Does nothing and returns False while requests run that may not be preempted."""
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def replace_workers(self) -> None:
        """Start other workers because one has ended. Requests are computed anew from their tokens, and no block is
        cached any more. Raises ``ExecutorFailedError`` if that does not work."""
        if self.sleeping.is_sleeping():
            raise ExecutorFailedError("a worker ended while the engine sleeps")
        drain(self.steps_in_flight)
        self._begin_anew()
        self.executor.replace_workers()
        if self.adapters is not None:
            self.adapters.restore()

    def stats(self) -> SchedulerStats:
        """Return the statistics for the client, with the adapters if they have changed since the last call."""
        stats = self.scheduler.stats()
        if self.adapters is not None:
            stats.loras = self.adapters.take_changes(self.scheduler.running)
        return stats

    def check_health(self) -> None:
        """Raise ``ExecutorFailedError`` if a worker fails or does not answer in time."""
        try:
            self.executor.check_health(_HEALTH_SECONDS)
        except WeightsDamagedError as error:
            self.damage = error
            raise

    def failpoints_fired(self) -> dict[str, int]:
        """Return how often each injected fault has happened."""
        return self._kv.failpoints.fired() if self._kv is not None else {}

    def shutdown(self) -> None:
        """Release the executor's resources. Idempotent."""
        if self._connector is not None:
            self._connector.shutdown()
        if self._grammars is not None:
            self._grammars.close()
        self.executor.shutdown()

    def _initialize_kv_cache(self, config: EngineConfig, kv_cache: KVCacheConfig, model: ModelInfo) -> WarmUp:
        if self._connector is None:
            return self.executor.initialize_kv_cache(kv_cache)
        if not model.pool_is_on_host:  # the worker allocates it
            warm_up = self.executor.initialize_kv_cache(kv_cache)
            self._connector.register_kv_caches(self.executor.kv_pool())
            return warm_up
        # Shared memory has no huge pages on most kernels, so a pool is shared only if others read from it. An engine
        # of role `both` therefore moves no KV unless --kv-transports asks for it.
        is_shared = bool(config.kv.transports) and config.kv.role != "decode"
        nbytes = model.pool_bytes(config.cache.block_size, kv_cache.num_blocks, kv_cache.num_state_slots)
        pool = PoolSpec(nbytes, is_shared)
        warm_up = self.executor.initialize_kv_cache(kv_cache, pool)
        self._connector.register_kv_caches(self.executor.kv_pool())
        return warm_up
