"""``LLM`` over a core in a process of its own, which may die alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine_core.processes import has_ended
from tokenloom import LLM, EngineDeadError, EnginePausedError, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = ["Once upon a time", [5, 6, 7], "The dog"]

SCRIPT = """
from tokenloom import LLM, SamplingParams
llm = LLM("tokenloom-demo", worker="hash", engine_process=True)
(output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print(len(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def llm(make_llm):
    return make_llm(num_gpu_blocks_override=64, engine_process=True, enable_prompt_embeds=True, num_threads=1)


@pytest.fixture
def killed():
    """One of its own for a test, with its process killed in the middle of requests."""
    llm = LLM("tokenloom-demo", worker="hash", hash_step_seconds=0.02, engine_process=True)
    yield llm
    llm.close()


def test_outputs_are_those_of_a_core_in_this_process(llm, make_llm):
    here = make_llm(num_gpu_blocks_override=64, enable_prompt_embeds=True)
    rows = torch.randn((20, 256), generator=torch.Generator().manual_seed(0))
    params = [
        GREEDY,
        SamplingParams(seed=3, n=2, max_tokens=8, logprobs=2, stop=["the"]),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes please"]), ignore_eos=True),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")),
        GREEDY,
    ]
    prompts = [*PROMPTS, "x", {"prompt_embeds": rows}]
    for there, ours in zip(*(each.generate(prompts, params, use_tqdm=False) for each in (llm, here)), strict=True):
        assert (there.outputs, there.error) == (ours.outputs, ours.error)
    streamed = [output.outputs[0].text for output in llm.stream(PROMPTS[0], GREEDY)]
    assert streamed[-1] == here.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    assert len(streamed) == 12


def test_it_sleeps_and_says_so(llm):
    (expected,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.sleep(1)
    with pytest.raises(EnginePausedError, match="call wake_up"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    llm.wake_up()
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs == expected.outputs
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    llm.sleep(0, "keep")
    with pytest.raises(EnginePausedError, match="paused"):
        list(stream)  # what has come, and then nothing can
    llm.wake_up(["scheduling"])
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs == expected.outputs


def test_an_interrupt_leaves_it_usable(llm, monkeypatch):
    (expected,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    real, calls = llm._client.get_output, []

    def interrupted():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real()

    monkeypatch.setattr(llm._client, "get_output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs == expected.outputs


def test_requests_of_a_killed_core_fail_by_type_and_the_program_goes_on(killed):
    enqueued = killed.enqueue("Once", SamplingParams(max_tokens=1000, ignore_eos=True))
    stream = killed.stream("upon", SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    os.kill(killed._client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        list(stream)
    (output,) = killed.next_finished()
    assert (output.request_id, output.outputs[0].finish_reason) == (enqueued, "error")
    assert "ended with status -9" in output.error
    for call in (
        lambda: killed.generate("a", GREEDY, use_tqdm=False),
        lambda: killed.enqueue("a"),
        lambda: killed.embed("a", use_tqdm=False),
        killed.reset_prefix_cache,
        killed.sleep,
    ):
        with pytest.raises(EngineDeadError, match="ended with status -9"):
            call()


def test_closing_ends_the_process():
    llm = LLM("tokenloom-demo", worker="hash", engine_process=True)
    pid = llm._client.pid
    llm.close()
    llm.close()
    assert has_ended(pid)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_what_is_wrong_is_a_value_error():
    with pytest.raises(ValueError, match="max_model_len 99999"):
        LLM("tokenloom-demo", max_model_len=99999, engine_process=True)


def test_a_script_needs_no_guard(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr
