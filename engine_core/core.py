"""The engine's loop without I/O."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from .config import EngineConfig
from .control.pausing import Pausing
from .control.sessions import Sessions
from .control.sleeping import Sleeping
from .executor.executor import Executor, PendingOutput
from .executor.worker_calls import CLIENT_METHODS
from .kv_cache.kv_cache_config import size_kv_cache
from .kv_cache.pool_memory import PoolMemory
from .kv_transfer.core_kv import CoreKV
from .kv_transfer.kv_connector import finish_transfers, start_transfers
from .scheduling.batch_queue import BatchQueue
from .scheduling.iteration_log import IterationLog
from .scheduling.scheduler import Scheduler
from .scheduling.step_dump import dump_failed_step
from .structured_output.manager import GrammarStep, StructuredOutputManager
from .wire.messages import AcceptTokens, CoreReady, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from .wire.scheduler_output import ModelRunnerOutput, SchedulerOutput

log = logging.getLogger(__name__)


class EngineCore:
    """Joins a scheduler and an executor. Used from one thread.

    Loads the model and settles the KV cache on construction; raises ``ValueError`` naming a setting or a feature of the
    model that does not work.
    """

    def __init__(self, config: EngineConfig, executor: Executor, kv: CoreKV | None = None) -> None:
        """``kv``: how its KV moves; None: it stays."""
        self.executor = executor
        self._kv = kv
        self._connector = kv.connector if kv is not None else None
        model = executor.load_model()
        kv_cache = size_kv_cache(config, model, executor.determine_available_memory)
        self._grammars: StructuredOutputManager | None = None
        if config.structured_output is not None:
            self._grammars = StructuredOutputManager(config.structured_output, model.vocab_size)
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            kv_cache,
            connector=self._connector,
            kv_policy=config.kv.policy,
            grammars=self._grammars,
        )
        self.sessions = Sessions(self.scheduler)
        self.pausing = Pausing(self.scheduler)
        self.sleeping = Sleeping(self.scheduler, self.pausing, executor)
        self._initialize_kv_cache(config, kv_cache.num_blocks, model.kv_bytes_per_token)
        self._batch_queue = self._make_batch_queue()
        self._observability = config.observability
        self._iterations = IterationLog() if config.observability.log_iterations else None
        self.num_steps = 0
        self.ready = CoreReady(
            num_kv_blocks=kv_cache.num_blocks,
            max_model_len=kv_cache.max_model_len,
            vocab_size=model.vocab_size,
            block_size=config.cache.block_size,
            kv_layout=model.kv_layout,
            numerics=model.numerics,
            hidden_size=model.hidden_size,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request, or an input of a session; it may end at once, with an output in the next step. Raises
        ``ValueError`` for an input that cannot be."""
        if request.resumable or request.request_id in self.sessions:
            self.sessions.add(request)
        else:
            self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; ids that are not live are ignored."""
        self._abort(request_ids)
        self.pausing.settle()

    def accept_tokens(self, message: AcceptTokens) -> None:
        """Gives a request the first tokens that it was added ahead of."""
        self.scheduler.accept_tokens(message)

    def has_work(self) -> bool:
        """Whether ``step`` would do anything. Not while every request waits for KV from elsewhere: see ``on_news``."""
        if self.scheduler.has_work() or self.scheduler.kv_events or self._batch_queue:
            return True
        return self._connector is not None and self._connector.has_news()

    def has_requests(self) -> bool:
        """Whether any request is live."""
        return bool(self.scheduler.requests)

    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return self._grammars is not None and self._grammars.num_compiling > 0

    def on_news(self, callback: Callable[[], None]) -> None:
        """``callback`` is called, from any thread, when there may be work that no call to this core brought."""
        if self._connector is not None:
            self._connector.on_news(callback)
        if self._grammars is not None:
            self._grammars.on_news(callback)

    def step(self, take_aborts: Callable[[], Iterable[str]] = tuple) -> EngineCoreOutputs:
        """One turn of the loop. ``take_aborts`` gives the requests that were aborted while a step executed."""
        outputs = self._step(take_aborts) if self._batch_queue is None else self._step_with_batch_queue(take_aborts)
        outputs += self.scheduler.take_early_outputs()
        if self.sessions:
            self.sessions.take(outputs)
        if self.pausing.is_settling:
            self.pausing.settle()
        if self.sleeping.is_settling:
            self.sleeping.settle()
        return EngineCoreOutputs(
            step=self.num_steps,
            outputs=outputs,
            scheduler_stats=self.scheduler.stats(),
            kv_events=self.scheduler.kv_events.take() if self.scheduler.kv_events else [],
        )

    def _step(self, take_aborts: Callable[[], Iterable[str]]) -> list[EngineCoreOutput]:
        """Schedule, execute, update."""
        outputs: list[EngineCoreOutput] = []
        scheduled = self.scheduler.schedule()
        if self._connector is not None:
            start_transfers(self._connector, scheduled)
        if scheduled.total_num_scheduled_tokens:
            with self._recovering(scheduled):
                result = self._execute(scheduled).result()
            if self._connector is not None:
                self._connector.wait_for_save()
            outputs = self._update(scheduled, result, take_aborts)
        if self._connector is not None and (news := finish_transfers(self._connector, scheduled)) is not None:
            self.scheduler.update_from_connector(news)
        return outputs

    def _step_with_batch_queue(self, take_aborts: Callable[[], Iterable[str]]) -> list[EngineCoreOutput]:
        """Schedules the next step while the last one runs; takes in the oldest when no other can begin before."""
        queue = self._batch_queue
        assert queue is not None
        scheduled = self.scheduler.schedule()
        is_deferred = self.scheduler.constrained.awaits_tokens(scheduled, self.scheduler.requests)
        with self._recovering(scheduled):
            if is_deferred:
                self._execute_model(scheduled)
            elif scheduled.total_num_scheduled_tokens:
                queue.put(scheduled, self._execute(scheduled))
                if not queue.is_full:
                    return []
            if not queue:
                return []
            oldest = queue.take_oldest()
            result = oldest.pending.result()
        outputs = self._update(oldest.scheduled, result, take_aborts)
        if is_deferred:  # now that the token before is known, so is what may follow it
            with self._recovering(scheduled):
                queue.put(scheduled, self._sample(self._start_grammars(scheduled)))
        return outputs

    def _execute(self, scheduled: SchedulerOutput) -> PendingOutput:
        """Begins both halves of a step. What grammars allow is computed while the model runs."""
        grammars = self._start_grammars(scheduled)
        try:
            self._execute_model(scheduled)
        finally:
            if grammars is not None:
                grammars.output()  # whoever goes on after a failure finds it at rest
        return self._sample(grammars)

    def _execute_model(self, scheduled: SchedulerOutput) -> None:
        if self._iterations is not None:
            self._iterations.begin()
        self.executor.execute_model(scheduled)

    def _sample(self, grammars: GrammarStep | None) -> PendingOutput:
        if grammars is None:
            return self.executor.sample_tokens(None)
        pending = self.executor.sample_tokens(grammars.output())
        self.scheduler.end_constrained(grammars.ended)
        return pending

    def _start_grammars(self, scheduled: SchedulerOutput) -> GrammarStep | None:
        return self.scheduler.constrained.start_step(scheduled, self.scheduler.requests)

    def _update(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput, take_aborts: Callable[[], Iterable[str]]
    ) -> list[EngineCoreOutput]:
        self._abort(take_aborts())
        self.num_steps += 1
        if self._iterations is not None:
            self._iterations.end(self.num_steps, scheduled)
        return self.scheduler.update_from_output(scheduled, result)

    def _abort(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort_requests(self.sessions.abort(request_ids) if self.sessions else request_ids)

    def pause(self, mode: str = "abort", clear_cache: bool = False) -> "Future[None]":
        """Holds still; done once nobody runs. See :meth:`Pausing.pause`."""
        return self.pausing.pause(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Goes on after a pause; without one nothing happens. Raises ``ValueError`` while asleep."""
        if self.sleeping.is_sleeping():
            raise ValueError("the engine sleeps: wake it up")
        self.pausing.resume()

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forgets all cached blocks. While requests run it is False, and nothing happens, unless they may be
        preempted."""
        return self.scheduler.reset_prefix_cache(preempt_running=preempt_running)

    def collective_rpc(self, method: str, args: list[object]) -> list[object]:
        """Calls a method of ``CLIENT_METHODS`` on every worker; their results, by rank. Raises ``ValueError`` for any
        other: what changes a worker's memory is for the core's own calls, which know what is cached and who runs."""
        if method not in CLIENT_METHODS:
            raise ValueError(f"no method {method!r} of workers to call; there are {sorted(CLIENT_METHODS)}")
        return self.executor.collective_rpc(method, *args)

    def profile(self, start: bool) -> None:
        """Starts to record what the workers compute, or stops. Raises ``ValueError`` as a worker does."""
        self.executor.collective_rpc("profile", start)

    def num_leases(self) -> int:
        """Promises to other engines that are open now."""
        return self._connector.num_leases() if self._connector is not None else 0

    def failpoints_fired(self) -> dict[str, int]:
        """How often each injected fault has happened."""
        return self._kv.failpoints.fired() if self._kv is not None else {}

    def shutdown(self) -> None:
        """Gives the executor's resources back. Idempotent."""
        if self._connector is not None:
            self._connector.shutdown()
        if self._grammars is not None:
            self._grammars.close()
        self.executor.shutdown()

    def _initialize_kv_cache(self, config: EngineConfig, num_blocks: int, bytes_per_token: int) -> None:
        if self._connector is None:
            self.executor.initialize_kv_cache(num_blocks)
            return
        # Only an owner's pool is mapped by others; a decode engine's is faster in huge pages.
        is_shared = bool(config.kv.transports) and config.kv.role != "decode"
        memory = PoolMemory.allocate(num_blocks * config.cache.block_size * bytes_per_token, shared=is_shared)
        self.executor.initialize_kv_cache(num_blocks, memory)
        self._connector.register_kv_caches(self.executor.kv_pool())

    def _make_batch_queue(self) -> BatchQueue | None:
        """None: steps do not overlap. Not where KV moves, either: only between steps is it known who writes where."""
        if self.executor.max_concurrent_batches == 1:
            return None
        if self._connector is not None:
            log.warning("async scheduling has no effect here: an engine that moves KV computes one step at a time")
            return None
        return BatchQueue(self.executor.max_concurrent_batches)

    @contextlib.contextmanager
    def _recovering(self, scheduled: SchedulerOutput) -> Iterator[None]:
        """A step that fails leaves the scheduler as if the worker had never known any request."""
        try:
            yield
        except Exception as error:
            scheduler = self.scheduler
            dump_failed_step(self._observability, error, scheduled, scheduler.requests, scheduler.stats())
            if self._batch_queue is not None:
                self._batch_queue.abandon()
            if self._iterations is not None:
                self._iterations.abandon()
            self.scheduler.recover_from_failed_step()
            raise
