"""The engine's loop without I/O."""

from collections.abc import Callable, Iterable

from .config import EngineConfig
from .kv_cache_config import size_kv_cache
from .messages import CoreReady, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from .scheduler import Scheduler
from .scheduler_output import ModelRunnerOutput, SchedulerOutput
from .worker import Executor


class EngineCore:
    """Joins a scheduler and an executor. Used from one thread.

    Loads the model and settles the KV cache on construction; raises ``ValueError`` naming a setting or a feature of the
    model that does not work.
    """

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        model = executor.load_model()
        kv_cache = size_kv_cache(config, model, executor.determine_available_memory)
        self.scheduler = Scheduler(config.scheduler, config.cache, kv_cache)
        executor.initialize_kv_cache(kv_cache.num_blocks)
        self.num_steps = 0
        self.ready = CoreReady(
            num_kv_blocks=kv_cache.num_blocks,
            max_model_len=kv_cache.max_model_len,
            vocab_size=model.vocab_size,
            block_size=config.cache.block_size,
            kv_layout=model.kv_layout,
            numerics=model.numerics,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request; it may end at once, with an output in the next step."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests without an output; ids that are not live are ignored."""
        self.scheduler.abort_requests(request_ids)

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return self.scheduler.has_work()

    def step(self, take_aborts: Callable[[], Iterable[str]] = tuple) -> EngineCoreOutputs:
        """Schedule, execute, update. ``take_aborts`` gives the requests that were aborted while the step executed."""
        outputs: list[EngineCoreOutput] = []
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            result = self._execute(scheduled)
            self.scheduler.abort_requests(take_aborts())
            outputs = self.scheduler.update_from_output(scheduled, result)
            self.num_steps += 1
        outputs += self.scheduler.take_early_outputs()
        return EngineCoreOutputs(step=self.num_steps, outputs=outputs, scheduler_stats=self.scheduler.stats())

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False, and nothing happens, while requests run."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Gives the executor's resources back. Idempotent."""
        self.executor.shutdown()

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self.executor.execute_model(scheduled)
        except Exception:
            self.scheduler.recover_from_failed_step()
            raise
