"""An executor whose caller is interrupted from the keyboard at chosen calls."""

from collections.abc import Callable, Collection
from typing import TypeVar

from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from tokenloom.engine_core.executor.executor import Executor

T = TypeVar("T")


class InterruptedExecutor:
    """Passes calls on. The n-th of those that begin a half of a step or wait for its result raises
    ``KeyboardInterrupt``, before or after the call, if n is in ``at``."""

    def __init__(self, executor: Executor, at: Collection[int], *, after: bool) -> None:
        self.executor = executor
        self.max_concurrent_batches = executor.max_concurrent_batches
        self.num_calls = 0
        self.num_interrupts = 0
        self._at = at
        self._after = after

    def __getattr__(self, name: str) -> object:
        return getattr(self.executor, name)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.call(lambda: self.executor.execute_model(scheduler_output))

    def sample_tokens(self, grammar: GrammarOutput | None) -> "InterruptedOutput":
        return InterruptedOutput(self, self.call(lambda: self.executor.sample_tokens(grammar)))

    def call(self, call: Callable[[], T]) -> T:
        self.num_calls += 1
        is_due = self.num_calls in self._at
        self.num_interrupts += is_due
        if is_due and not self._after:
            raise KeyboardInterrupt
        result = call()
        if is_due:
            raise KeyboardInterrupt
        return result


class InterruptedOutput:
    """Waits for the output of a step, and may be interrupted."""

    def __init__(self, executor: InterruptedExecutor, pending: PendingOutput) -> None:
        self._executor = executor
        self._pending = pending

    def result(self) -> ModelRunnerOutput:
        return self._executor.call(self._pending.result)
