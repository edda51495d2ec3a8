"""The engine's loop without I/O."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from .config import EngineConfig
from .core_kv import CoreKV
from .kv_cache_config import size_kv_cache
from .kv_connector import finish_transfers, start_transfers
from .messages import AcceptTokens, CoreReady, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from .pausing import Pausing
from .pool_memory import PoolMemory
from .scheduler import Scheduler
from .scheduler_output import ModelRunnerOutput, SchedulerOutput
from .sleeping import Sleeping
from .structured_output.manager import StructuredOutputManager
from .worker import Executor


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
        self.pausing = Pausing(self.scheduler)
        self.sleeping = Sleeping(self.scheduler, self.pausing, executor)
        self._initialize_kv_cache(config, kv_cache.num_blocks, model.kv_bytes_per_token)
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
        """Queues a request; it may end at once, with an output in the next step."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; ids that are not live are ignored."""
        self.scheduler.abort_requests(request_ids)
        self.pausing.settle()

    def accept_tokens(self, message: AcceptTokens) -> None:
        """Gives a request the first tokens that it was added ahead of."""
        self.scheduler.accept_tokens(message)

    def has_work(self) -> bool:
        """Whether ``step`` would do anything. Not while every request waits for KV from elsewhere: see ``on_news``."""
        return self.scheduler.has_work() or (self._connector is not None and self._connector.has_news())

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
        """Schedule, execute, update. ``take_aborts`` gives the requests that were aborted while the step executed."""
        outputs: list[EngineCoreOutput] = []
        scheduled = self.scheduler.schedule()
        if self._connector is not None:
            start_transfers(self._connector, scheduled)
        if scheduled.total_num_scheduled_tokens:
            result = self._compute(scheduled)
            if self._connector is not None:
                self._connector.wait_for_save()
            self.scheduler.abort_requests(take_aborts())
            outputs = self.scheduler.update_from_output(scheduled, result)
            self.num_steps += 1
        if self._connector is not None and (news := finish_transfers(self._connector, scheduled)) is not None:
            self.scheduler.update_from_connector(news)
        outputs += self.scheduler.take_early_outputs()
        if self.pausing.is_settling:
            self.pausing.settle()
        if self.sleeping.is_settling:
            self.sleeping.settle()
        return EngineCoreOutputs(step=self.num_steps, outputs=outputs, scheduler_stats=self.scheduler.stats())

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

    def _compute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        grammar = self.scheduler.constrained.start_step(scheduled, self.scheduler.requests)
        try:
            self.executor.execute_model(scheduled)
            result = self.executor.sample_tokens(grammar.output() if grammar is not None else None)
        except Exception:
            if grammar is not None:
                grammar.output()  # whoever goes on finds it at rest
            self.scheduler.recover_from_failed_step()
            raise
        if grammar is not None:
            self.scheduler.end_constrained(grammar.ended)
        return result
