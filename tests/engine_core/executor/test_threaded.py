import threading

import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_core, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import ExecutorFailedError
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


def test_a_core_with_async_scheduling_gives_every_request_its_tokens() -> None:
    core = make_core(async_scheduling=True, num_blocks=30, budget=24)
    assert isinstance(core.executor, ThreadedExecutor)
    for n in range(20):
        core.add_request(make_request(f"r{n}", [n] * (n + 1), 20))
    outputs = finish(core, 3000)
    for n in range(20):
        assert tokens_of(outputs[f"r{n}"]) == expected_tokens([n] * (n + 1), 20, VOCAB_SIZE)
    check_idle(core.scheduler)
    core.shutdown()


class BlockedWorker(HashWorker):
    """Waits in its second step until the test lets it continue."""

    may_go = threading.Event()
    num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            assert self.may_go.wait(10)
        super().execute_model(scheduler_output)


def test_the_caller_continues_while_a_step_runs() -> None:
    config = make_config(async_scheduling=True)
    worker = BlockedWorker(config, vocab_size=VOCAB_SIZE)
    core = EngineCore(config, ThreadedExecutor(worker))
    core.add_request(make_request("a", [1, 2], 4))
    core.step()
    (first,) = core.step().outputs  # of the first step: the second is blocked
    core.add_request(make_request("b", [3, 4], 1))
    worker.may_go.set()
    outputs = finish(core)
    assert tokens_of([first, *outputs["a"]]) == expected_tokens([1, 2], 4, VOCAB_SIZE)
    assert tokens_of(outputs["b"]) == expected_tokens([3, 4], 1, VOCAB_SIZE)
    core.shutdown()


class Promise:
    """The output of a step, which is there once the next step has begun."""

    def __init__(self, output: ModelRunnerOutput, next_began: threading.Event) -> None:
        self._output, self._next_began = output, next_began

    def result(self) -> ModelRunnerOutput:
        assert self._next_began.wait(10), "the worker's thread waits for the output, too"
        return self._output


class PromisingWorker(HashWorker):
    """Returns from a step before its tokens are there, as a worker of a device does. There are four steps."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, vocab_size=VOCAB_SIZE)
        self.began = [threading.Event() for _ in range(5)]
        self.began[4].set()
        self.num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.began[self.num_steps].set()
        self.num_steps += 1
        super().execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Promise:  # type: ignore[override]
        return Promise(super().sample_tokens(grammar), self.began[self.num_steps])


def test_a_step_begins_before_the_tokens_of_the_last_one_are_there() -> None:
    config = make_config(async_scheduling=True)
    core = EngineCore(config, ThreadedExecutor(PromisingWorker(config)))
    core.add_request(make_request("a", [1, 2], 4))
    assert tokens_of(finish(core)["a"]) == expected_tokens([1, 2], 4, VOCAB_SIZE)
    core.shutdown()


class FailingWorker(HashWorker):
    """Fails in its third step."""

    num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("the device is gone")
        super().execute_model(scheduler_output)


def test_a_failure_on_the_thread_is_the_steps() -> None:
    config = make_config(async_scheduling=True)
    core = EngineCore(config, ThreadedExecutor(FailingWorker(config, vocab_size=VOCAB_SIZE)))
    core.add_request(make_request("a", [1] * 9, 6))
    outputs = core.step().outputs + core.step().outputs + core.step().outputs
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    outputs += finish(core)["a"]
    assert tokens_of(outputs) == expected_tokens([1] * 9, 6, VOCAB_SIZE)
    check_idle(core.scheduler)
    core.shutdown()


def test_a_call_by_name_waits_for_the_steps_before_it() -> None:
    executor = ThreadedExecutor(make_worker(make_config()))
    (model,) = executor.collective_rpc("load_model")
    assert isinstance(model, dict)
    assert model["vocab_size"] == VOCAB_SIZE
    with pytest.raises(ValueError, match="has no method 'shutdown' to call; declared: "):
        executor.collective_rpc("shutdown")
    executor.shutdown()
    executor.shutdown()


class UnhealthyWorker(HashWorker):
    """Answers a health check only after the test has continued, and then with an error."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.may_answer = threading.Event()

    def check_health(self) -> None:
        assert self.may_answer.wait(10)
        raise RuntimeError("the device is gone")


def test_a_health_check_waits_for_a_bounded_time() -> None:
    worker = UnhealthyWorker(make_config())
    executor = ThreadedExecutor(worker)
    with pytest.raises(ExecutorFailedError, match=r"did not answer within 0\.01 s"):
        executor.check_health(0.01)
    worker.may_answer.set()
    with pytest.raises(ExecutorFailedError, match="the worker failed: the device is gone"):
        executor.check_health(10)
    executor.shutdown()
