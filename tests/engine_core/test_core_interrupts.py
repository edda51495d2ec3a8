"""Interrupts the caller of a core, as Ctrl-C does, wherever a step begins or is waited for."""

from collections.abc import Collection, Iterator

import pytest

from tests.engine_core.executor.interrupted import InterruptedExecutor
from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request, make_worker
from tests.engine_core.invariants import check_idle, check_scheduler
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.messages import EngineCoreOutput
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

PROMPTS = {name: [seed] * 9 for seed, name in enumerate("abc")}
NUM_TOKENS = 6
NUM_CALLS = 21
"""Calls of an undisturbed run, at least: seven steps with three calls each."""


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Interrupted:
    """Holds a core, and what its clients received from it."""

    def __init__(self, executor: str, at: Collection[int], *, after: bool) -> None:
        config = make_config(budget=16, async_scheduling=executor != "uniproc")
        self.worker = make_worker(config)
        self.executor = InterruptedExecutor(EXECUTORS[executor](self.worker), at, after=after)
        self.core = EngineCore(config, self.executor)  # type: ignore[arg-type]
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, suffix: str = "") -> None:
        for name, prompt in PROMPTS.items():
            self.core.add_request(make_request(name + suffix, prompt, NUM_TOKENS))

    def step(self) -> None:
        for output in self.core.step().outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self) -> Iterator[None]:
        """Step until the core is idle; pause after each interrupt."""
        for _ in range(200):
            if not self.core.has_work():
                return
            try:
                self.step()
            except KeyboardInterrupt:
                check_scheduler(self.core.scheduler)
                yield
        raise AssertionError("still busy after 200 steps")

    def finish(self) -> None:
        for _ in self.run():
            pass

    def check(self, suffix: str = "") -> None:
        """Check that each request got each of its tokens once."""
        for name, prompt in PROMPTS.items():
            received: list[int] = []
            for output in self.outputs[name + suffix]:
                assert output.token_index == len(received)
                received += output.new_token_ids
            assert received == expected_tokens(prompt, NUM_TOKENS, VOCAB_SIZE)
            assert self.outputs[name + suffix][-1].finish_reason is not None

    def check_idle(self) -> None:
        self.core.add_request(make_request("last", [1], 1))  # its step makes the worker forget the others
        self.finish()
        check_idle(self.core.scheduler)
        self.core.executor.collective_rpc("resident_bytes")  # after the steps
        assert self.worker._rows.keys() <= {"last"}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, NUM_CALLS + 1))
def test_every_request_gets_its_tokens_after_an_interrupt(executor: str, at: int, after: bool) -> None:
    run = Interrupted(executor, {at}, after=after)
    run.add()
    run.finish()
    assert run.executor.num_interrupts == 1
    run.check()
    run.check_idle()
    run.core.shutdown()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_every_request_gets_its_tokens_after_several_interrupts(executor: str, every: int, after: bool) -> None:
    at = {*range(4, 40, every), 20, 21}  # also during the recovery from another one
    run = Interrupted(executor, at, after=after)
    run.add()
    run.finish()
    assert run.executor.num_interrupts > 5
    run.check()
    run.check_idle()
    run.core.shutdown()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, NUM_CALLS + 1))
def test_aborting_sleeping_and_adding_work_after_an_interrupt(executor: str, at: int, after: bool) -> None:
    run = Interrupted(executor, {at}, after=after)
    core = run.core
    run.add()
    next(run.run())
    core.abort_requests(PROMPTS)
    asleep = core.sleeping.sleep(1)
    run.outputs.clear()
    run.finish()
    assert asleep.done()
    assert not run.outputs, "they were aborted"
    core.sleeping.wake_up()
    run.add("again")
    run.finish()
    run.check("again")
    run.check_idle()
    core.shutdown()


def test_falling_asleep_may_be_interrupted(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Interrupted(executor, (), after=False)
    core, inner = run.core, run.executor.executor
    run.add()
    run.step()
    core.sleeping.sleep(1, "wait")

    def interrupted(method: str, *args: object) -> list[object]:
        inner_rpc(method, *args)
        raise KeyboardInterrupt

    inner_rpc = inner.collective_rpc
    monkeypatch.setattr(inner, "collective_rpc", interrupted)
    next(run.run())
    monkeypatch.undo()
    core.sleeping.wake_up()
    run.finish()
    run.check()
    run.add("again")
    run.finish()
    run.check("again")
    core.shutdown()
