"""``LLMEngine``: requests that come and go while a program steps the engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from tokenloom import (
    LLM,
    EngineArgs,
    EnginePausedError,
    EngineStats,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tokenloom.engine_core.data.errors import EngineDeadError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PIECES = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
FINAL = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
BAD = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="("))
"""Only the core, which compiles grammars, refuses it."""
MODEL = "tokenloom-demo"


def args(**options: Any) -> EngineArgs:
    return EngineArgs(MODEL, worker="hash", max_model_len=256, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "in its own"])
def shared(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(args(engine_process=request.param, hash_step_seconds=0.002))
    yield made
    made.close()


@pytest.fixture
def engine(shared: LLMEngine) -> Iterator[LLMEngine]:
    yield shared
    assert not shared.has_unfinished_requests()
    assert shared.step() == []
    assert not shared.loop._live


@pytest.fixture(scope="module")
def expected() -> list[int]:
    llm = LLM(MODEL, worker="hash", max_model_len=256)
    (output,) = llm.generate("Once", GREEDY, use_tqdm=False)
    llm.close()
    return output.outputs[0].token_ids


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_a_request_that_joins_in_the_middle_gets_the_tokens_of_one_alone(
    engine: LLMEngine, expected: list[int]
) -> None:
    engine.add_request("a", "Once", PIECES)
    first = [output for _ in range(3) for output in engine.step() if isinstance(output, RequestOutput)]
    engine.add_request("b", "Once", FINAL)
    assert engine.get_num_unfinished_requests() == 2
    rest = run(engine)
    of_a = [output for output in [*first, *rest] if output.request_id == "a"]
    assert [each for output in of_a for each in output.outputs[0].token_ids] == expected
    assert [output.finished for output in of_a] == [False] * (len(of_a) - 1) + [True]
    (of_b,) = (output for output in rest if output.request_id == "b")
    assert (of_b.outputs[0].token_ids, of_b.finished) == (expected, True)


def test_cumulative_outputs_grow(engine: LLMEngine, expected: list[int]) -> None:
    engine.add_request("a", {"prompt": "Once"}, GREEDY)
    lengths = [len(output.outputs[0].token_ids) for output in run(engine)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(expected)


def test_only_the_last_output_of_several_samples_is_finished(engine: LLMEngine) -> None:
    engine.add_request("n", "Once", SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ends = {output.outputs[0].index for output in outputs if output.outputs[0].finished()}
    assert ends == {0, 1, 2}


def test_an_aborted_request_returns_what_it_has_and_its_name_is_free_again(engine: LLMEngine) -> None:
    engine.add_request("a", "Once", LONG)
    engine.step()
    (output,) = engine.abort_request("a")
    assert isinstance(output, RequestOutput)
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    assert engine.abort_request(["a", "never"]) == []
    engine.add_request("a", "Once", GREEDY)
    assert run(engine)[-1].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "live"}, "'live' is that of a request that has not ended"),
        ({"request_id": 7}, "must be a string"),
        ({"prompt": [5] * 256}, "maximum context length"),
        ({"priority": 1}, "priority"),
        ({"params": PoolingParams()}, "pooling_task is not set"),
        ({"params": 5}, "params must be SamplingParams or PoolingParams, not int"),
        ({"params": [GREEDY, GREEDY]}, "params must be SamplingParams or PoolingParams, not list"),
        ({"prompt": 3.5}, "prompt"),
    ],
)
def test_a_wrong_request_is_refused_and_others_go_on(engine: LLMEngine, change: dict[str, Any], message: str) -> None:
    engine.add_request("live", "Once", GREEDY)
    with pytest.raises(ValueError, match=message):
        engine.add_request(**{"request_id": "wrong", "prompt": "Once", "params": GREEDY, **change})
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"live"}
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_what_only_the_core_refuses_comes_as_an_output_with_an_error(engine: LLMEngine) -> None:
    engine.add_request("bad", "x", BAD)
    engine.add_request("good", "Once", GREEDY)
    last = {output.request_id: output for output in run(engine)}
    assert "regex" in (last["bad"].error or "")
    assert last["bad"].outputs[0].finish_reason == "error"
    assert (last["good"].error, last["good"].outputs[0].finish_reason) == (None, "length")


def test_a_conversation_is_what_llm_makes_of_it(engine: LLMEngine) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    engine.add_request("chat", engine.chat_prompt(messages), GREEDY)
    outputs = run(engine)
    llm = LLM(MODEL, worker="hash", max_model_len=256)
    (ours,) = llm.chat(messages, GREEDY, use_tqdm=False)
    llm.close()
    assert (outputs[-1].prompt, outputs[-1].outputs[0].token_ids) == (ours.prompt, ours.outputs[0].token_ids)
    with pytest.raises(ValueError, match="must be"):
        engine.chat_prompt([{"role": "user", "content": 5}])


def test_while_asleep_requests_are_refused_and_those_that_were_kept_go_on(
    engine: LLMEngine, expected: list[int]
) -> None:
    engine.add_request("kept", "Once", LONG)
    engine.step()
    engine.sleep(0, "keep")
    with pytest.raises(EnginePausedError, match="paused"):
        run(engine)  # returns what has come, and then nothing can
    with pytest.raises(EnginePausedError):
        engine.add_request("new", "Once", GREEDY)
    engine.wake_up(["scheduling"])
    assert not engine.is_sleeping()
    token_ids = run(engine)[-1].outputs[0].token_ids
    assert (token_ids[: len(expected)], len(token_ids)) == (expected, 200)


def test_what_a_failed_step_ended_is_returned_by_the_next(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("broken")

    engine.add_request("a", "Once", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(engine.client, "get_output", fail)
        with pytest.raises(OSError, match="broken"):
            engine.step()
    (output,) = engine.step()
    assert "broken" in (output.error or "")
    engine.check_health()


def test_vectors() -> None:
    engine = LLMEngine(EngineArgs(MODEL, num_kv_blocks=64, max_num_seqs=4, num_threads=1))
    try:
        engine.add_request("v", "Once", PoolingParams(task="embed"))
        (output,) = run(engine)
        assert (output.request_id, output.finished) == ("v", True)
        assert output.outputs.data.ndim == 1  # type: ignore[attr-defined]
    finally:
        engine.close()


def test_a_start_that_fails_late_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def fail(self: LLMEngine, *_: object) -> None:
        monkeypatch.setattr(self.client, "close", lambda close=self.client.close: closed.append(close()))
        raise RuntimeError("no room")

    monkeypatch.setattr(LLMEngine, "_prepare", fail)
    with pytest.raises(RuntimeError, match="no room"):
        LLMEngine(args(engine_process=True))
    assert closed == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_process": "yes"}, "engine_process must be of type bool, not 'yes'"),
        ({"log_stats_interval": 0}, "log_stats_interval must be more than 0 seconds"),
        ({"log_stats_interval": True}, "log_stats_interval must be of type int or float"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        args(**options)


def test_lines_of_statistics(caplog: pytest.LogCaptureFixture) -> None:
    engine = LLMEngine(args(log_stats_interval=3600))
    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    engine.add_request("a", "Once", GREEDY)
    run(engine)
    engine.do_log_stats()
    engine.close()
    (line,) = caplog.messages
    assert line.startswith("Engine 000: Avg prompt throughput: ")
    assert "Running: 0 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%" in line


def test_other_loggers_get_the_numbers_without_the_line(caplog: pytest.LogCaptureFixture) -> None:
    class Kept(list[EngineStats]):
        log = list.append

    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    kept = Kept()
    engine = LLMEngine(args(disable_log_stats=True, log_stats_interval=3600), stat_loggers=[kept])
    engine.add_request("a", "Once", GREEDY)
    run(engine)
    engine.do_log_stats()
    engine.close()
    (stats,) = kept
    assert stats.generation_throughput > 0
    assert stats.prompt_throughput > 0
    assert not caplog.messages


def test_without_statistics_the_loop_has_no_listener() -> None:
    llm = LLM(MODEL, worker="hash")
    engine = LLMEngine(args(disable_log_stats=True))
    assert llm.llm_engine.loop.on_step is None
    assert engine.loop.on_step is None
    llm.close()
    engine.close()


@pytest.mark.parametrize("engine_process", [False, True])
def test_a_closed_engine_takes_no_request(engine_process: bool) -> None:
    engine = LLMEngine(args(engine_process=engine_process))
    engine.close()
    with pytest.raises(EngineDeadError, match="the engine core was closed"):
        engine.add_request("0", "Once", GREEDY)
    assert not engine.has_unfinished_requests()
    engine.close()
