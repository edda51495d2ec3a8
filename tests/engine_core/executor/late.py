"""An executor that computes as late as possible, on the caller's thread: steps overlap as much as they can."""

from collections import deque
from collections.abc import Callable

from tokenloom.engine_core.data.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    as_pending,
)
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor
from tokenloom.engine_core.executor.worker import Worker


class LateExecutor(UniProcExecutor):
    """Begins a step only when its output, or that of a later step, is waited for."""

    max_concurrent_batches = 2

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._begun: deque[LateOutput] = deque()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._executing = LateOutput(self, scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> "LateOutput":
        self._executing.grammar = grammar
        self._begun.append(self._executing)
        return self._executing

    def compute_oldest(self) -> None:
        self._begun.popleft().compute(self._worker)


class LateOutput:
    """Holds a step, and its output once it is computed."""

    def __init__(self, executor: LateExecutor, scheduled: SchedulerOutput) -> None:
        self.grammar: GrammarOutput | None = None
        self._executor, self._scheduled = executor, scheduled
        self._output: PendingOutput | Exception | None = None

    def compute(self, worker: Worker) -> None:
        try:
            worker.execute_model(self._scheduled)
            self._output = as_pending(worker.sample_tokens(self.grammar))
        except Exception as error:
            self._output = error

    def result(self) -> ModelRunnerOutput:
        while self._output is None:
            self._executor.compute_oldest()
        if isinstance(self._output, Exception):
            raise self._output
        return self._output.result()


EXECUTORS: dict[str, Callable[[Worker], Executor]] = {
    "uniproc": UniProcExecutor,
    "late": LateExecutor,
    "threaded": ThreadedExecutor,
}
"""All but the first need async scheduling."""
