"""Interrupts and failures in the middle of an offline call: the next calls find a usable engine."""

import pytest

from tokenloom import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "async scheduling"])
def llm(request, make_llm):
    llm = make_llm(max_num_seqs=16, num_gpu_blocks_override=64, async_scheduling=request.param)
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def no_leak(llm):
    yield
    core = llm._client._core
    while core.has_work():  # a step in flight, of a request that has ended
        assert not core.step().outputs
    assert core.scheduler.stats().num_free_blocks == core.ready.num_kv_blocks


def check_usable(llm, expected):
    """Check that it sleeps, wakes up and gives more answers than the batch has rows, of which none may be lost."""
    llm.sleep(level=1)
    llm.wake_up()
    outputs = llm.generate([expected.prompt_token_ids] * 20, GREEDY, use_tqdm=False)
    assert [output.outputs for output in outputs] == [expected.outputs] * 20


def test_an_interrupt_leaves_a_usable_engine(llm):
    (expected,) = llm.generate([5] * 40, GREEDY, use_tqdm=False)
    calls = 0

    class Bar:
        def __init__(self, **_):
            pass

        def update(self, _):
            raise KeyboardInterrupt

        def close(self):
            nonlocal calls
            calls += 1

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5] * 40, [6] * 40], [GREEDY, SamplingParams(max_tokens=1)], use_tqdm=Bar)
    assert calls == 1
    (output,) = llm.generate([5] * 40, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 32  # the step itself was not interrupted
    assert output.outputs == expected.outputs
    check_usable(llm, expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_a_usable_engine(llm, monkeypatch, error):
    (expected,) = llm.generate([9] * 40, GREEDY, use_tqdm=False)
    runner = llm._client._core.executor._worker._runner
    steps = 0

    def fail_in_the_third_step(inputs):
        nonlocal steps
        steps += 1
        if steps == 3:
            raise error("broken")
        return type(runner)._compute(runner, inputs)

    monkeypatch.setattr(runner, "_compute", fail_in_the_third_step)
    with pytest.raises(error, match="broken"):
        llm.generate([[9] * 40] * 20, GREEDY, use_tqdm=False)
    check_usable(llm, expected)


def test_interrupts_while_a_step_is_awaited_leave_a_usable_engine(llm, monkeypatch):
    (expected,) = llm.generate([7] * 40, GREEDY, use_tqdm=False)
    executor = llm._client._core.executor
    sample_tokens = type(executor).sample_tokens
    steps = 0

    class Interrupted:
        def __init__(self, pending):
            self.pending = pending

        def result(self):
            nonlocal steps
            steps += 1
            if steps % 3 == 0:
                raise KeyboardInterrupt
            return self.pending.result()

    monkeypatch.setattr(executor, "sample_tokens", lambda grammar: Interrupted(sample_tokens(executor, grammar)))
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[7] * 40] * 20, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_usable(llm, expected)
