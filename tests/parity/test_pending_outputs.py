"""Steps that take their tokens from a device that is behind: tokens are those of a host that waits for each step."""

import pytest

from tests.gpu_worker.cuda.late_platform import LatePlatform, use_tensor_backend
from tests.parity.test_async_scheduling import BUDGET, PARAMS, PROMPTS, Followed, core_of, token_ids, told
from tokenloom import LLM
from tokenloom.gpu_worker import devices

KINDS = ["greedy", "seeds", "stop tokens", "samples", "penalties", "logprobs", "repetition"]
"""Requests whose tokens the device draws without waiting: not those with bad words, nor with grammars."""


def make_llm(*, overlaps: bool) -> LLM:
    return LLM(
        "tokenloom-demo",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=20,
        attention_backend="torch",
        async_scheduling=overlaps,
    )


@pytest.fixture(scope="module")
def pair():
    """On a late device with async scheduling, and without. There are so few blocks that requests are preempted."""
    with pytest.MonkeyPatch.context() as patch:
        use_tensor_backend(patch)
        patch.setattr(devices, "CPUPlatform", LatePlatform)
        llms = [make_llm(overlaps=overlaps) for overlaps in (True, False)]
        yield llms
        for llm in llms:
            llm.close()


def link_of(llm):
    return core_of(llm).executor._worker._platform.link


def run_both(pair, follow):
    runs = []
    for llm in pair:
        core_of(llm).reset_prefix_cache()
        runs.append(follow(Followed(llm), llm, overlaps=llm is pair[0]).finish())
    on, off = runs
    assert on.tokens == off.tokens
    assert on.ends == off.ends
    return on


def test_what_the_device_draws(pair):
    params = [PARAMS[KINDS[index % len(KINDS)]] for index in range(len(PROMPTS))]
    before = [link_of(llm).num_sends for llm in pair]
    on, off = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in pair)
    assert [told(output) for output in on] == [told(output) for output in off]
    for llm, sends in zip(pair, before, strict=True):
        assert link_of(llm).num_sends > sends
        stats = core_of(llm).scheduler.stats()
        assert stats.num_free_blocks == core_of(llm).ready.num_kv_blocks
    assert core_of(pair[0])._max_in_flight == 2


def test_requests_of_every_kind_together(pair):
    params = list(PARAMS.values())
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(params))]
    on, off = (llm.generate(prompts, params, use_tqdm=False) for llm in pair)
    assert [told(output) for output in on] == [told(output) for output in off]
    assert all(core_of(llm).scheduler.stats().num_preemptions for llm in pair)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_aborts_while_tokens_are_on_their_way(pair, num_steps):
    """The rows of the requests that end are those of the next ones at once."""

    def follow(run, llm, *, overlaps):
        for index in range(4):
            run.add(str(index), token_ids(llm, index), 12)
        run.step(num_steps + overlaps)
        run.core.abort_requests(["1", "2"])
        for index in range(4, 6):
            run.add(str(index), token_ids(llm, index), 12)
        return run

    found = []
    for llm in pair:
        core_of(llm).reset_prefix_cache()
        run = follow(Followed(llm), llm, overlaps=llm is pair[0]).finish()
        found.append({name: tokens for name, tokens in run.tokens.items() if name not in "12"})
    assert found[0] == found[1]
    assert all(len(tokens) == 12 for tokens in found[0].values())


@pytest.mark.parametrize("num_steps", [1, 3])
def test_preemption_while_tokens_are_on_their_way(pair, num_steps):
    def follow(run, llm, *, overlaps):
        for index in range(4):
            run.add(str(index), token_ids(llm, index), 12)
        if overlaps:
            for _ in range(3):
                run.step(num_steps)
                assert run.core.reset_prefix_cache(preempt_running=True)
        return run

    run_both(pair, follow)


def test_a_step_that_fails_leaves_no_token_behind(pair, monkeypatch):
    llm = pair[0]
    runner = core_of(llm).executor._worker._runner
    whole = Followed(pair[1])
    lossy = Followed(llm)
    for run, each in ((whole, pair[1]), (lossy, llm)):
        core_of(each).reset_prefix_cache()
        for index in range(3):
            run.add(str(index), token_ids(each, index), 12)
    whole.finish()
    lossy.step(5)

    def fail(inputs):
        monkeypatch.undo()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner, "_compute", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        lossy.step(3)
    lossy.finish()
    assert lossy.tokens == whole.tokens
