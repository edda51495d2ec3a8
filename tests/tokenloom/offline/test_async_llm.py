"""``AsyncLLM``: many tasks, one engine; who goes away, reads slowly or loses the core."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.processes import has_ended
from tokenloom import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    EnginePausedError,
    EngineStats,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tokenloom.offline.llm_engine import LLMEngine
from tokenloom.offline.outputs import CompletionOutput, Logprob, OutputCollector

MODEL = "tokenloom-demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PIECES = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
BAD = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="("))
THREAD = "tokenloom-engine"


def make(**options: Any) -> AsyncLLM:
    options = {"hash_step_seconds": 0.002, **options}
    return AsyncLLM.from_engine_args(EngineArgs(MODEL, worker="hash", max_model_len=2048, **options))


@pytest.fixture(scope="module", params=[True, False], ids=["a process of its own", "a thread"])
def shared(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    made = make(engine_process=request.param)
    yield made
    made.close()


@pytest.fixture
async def llm(shared: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    yield shared
    assert await shared._call(LLMEngine.get_num_unfinished_requests) == 0
    assert not shared._live
    assert not shared._thread._collectors


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[str, list[int]]]:
    llm = LLM(MODEL, worker="hash", max_model_len=2048)
    prompts = ["Once", "upon", "a time"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.close()
    firsts = [output.outputs[0] for output in outputs]
    return {prompt: (first.text, first.token_ids) for prompt, first in zip(prompts, firsts, strict=True)}


def core_pid(llm: AsyncLLM) -> int:
    engine = llm._thread._engine
    assert engine is not None
    pid = engine.client.pid  # type: ignore[attr-defined]
    assert isinstance(pid, int)
    return pid


async def read(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def test_tasks_at_a_time_get_what_llm_returns(llm: AsyncLLM, expected: dict[str, tuple[str, list[int]]]) -> None:
    whole, pieces = await asyncio.gather(
        asyncio.gather(*(read(llm, prompt) for prompt in expected)),
        asyncio.gather(*(read(llm, prompt, PIECES) for prompt in expected)),
    )
    for prompt, outputs, parts in zip(expected, whole, pieces, strict=True):
        last = outputs[-1].outputs[0]
        assert (last.text, last.token_ids) == expected[prompt]
        assert "".join(part.outputs[0].text for part in parts) == expected[prompt][0]
        assert [each for part in parts for each in part.outputs[0].token_ids] == expected[prompt][1]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_a_slow_reader_gets_what_has_come_in_one_piece_and_holds_nobody_up(
    llm: AsyncLLM, expected: dict[str, tuple[str, list[int]]]
) -> None:
    slow = llm.generate("Once", PIECES)
    first = await anext(slow)
    await read(llm, "upon", GREEDY)  # ends although nobody reads the other one, which by then has ended too
    while llm._thread._collectors:
        await llm.is_sleeping()  # any call, which takes its turn between two steps
    rest = [output async for output in slow]
    assert len(rest) == 1
    texts = [output.outputs[0].text for output in (first, *rest)]
    assert "".join(texts) == expected["Once"][0]
    assert first.outputs[0].token_ids + rest[0].outputs[0].token_ids == expected["Once"][1]


async def test_closing_a_generator_and_cancelling_its_task_abort_the_request(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("Once", ENDLESS, "same")) as outputs:
        await anext(outputs)
    # Its name is free at once, and its end does not reach the request that has it now.
    assert len(await read_named(llm, "same")) > 0
    task = asyncio.create_task(read(llm, "Once", ENDLESS))
    while not await llm._call(LLMEngine.get_num_unfinished_requests):
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def read_named(llm: AsyncLLM, name: str) -> list[str]:
    return [output.request_id async for output in llm.generate("Once", GREEDY, name)]


async def test_abort_ends_a_generator_with_a_last_output(llm: AsyncLLM) -> None:
    generator = llm.generate("Once", ENDLESS, "long")
    await anext(generator)
    with pytest.raises(ValueError, match="'long' is that of a request that has not ended"):
        await anext(llm.generate("Once", GREEDY, "long"))
    await llm.abort(["long", "never"])
    *_, last = [output async for output in generator]
    assert (last.outputs[0].finish_reason, last.finished) == ("abort", True)


async def test_a_wrong_request_fails_alone(llm: AsyncLLM, expected: dict[str, tuple[str, list[int]]]) -> None:
    async def fail(prompt: Any, params: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            await read(llm, prompt, params)

    *_, good = await asyncio.gather(
        fail([5] * 5000, GREEDY, "maximum context length"),
        fail("x", BAD, "regex"),
        fail({"nothing": 1}, GREEDY, "not supported"),
        read(llm, "Once"),
    )
    assert good[-1].outputs[0].token_ids == expected["Once"][1]


async def test_a_request_without_an_id_gets_one_that_no_other_has(llm: AsyncLLM) -> None:
    number = next(llm._numbers)
    taken = [f"async-{number + ahead}" for ahead in (1, 2)]
    async with (
        aclosing(llm.generate("a", ENDLESS, taken[0])) as one,
        aclosing(llm.generate("a", ENDLESS, taken[1])) as two,
    ):
        await anext(one)
        await anext(two)
        async for output in llm.generate("Once", GREEDY):
            assert output.request_id == f"async-{number + 3}"
    with pytest.raises(ValueError, match="request_id must be a string, not 7"):
        await anext(llm.generate("a", GREEDY, 7))  # type: ignore[arg-type]


async def test_sleep_refuses_new_requests_and_those_that_were_kept_go_on(llm: AsyncLLM) -> None:
    generator = llm.generate("Once", PIECES)
    await anext(generator)
    await llm.sleep(0, "keep")
    with pytest.raises(EnginePausedError, match="paused"):
        await read(llm, "upon")
    await llm.wake_up(["scheduling"])
    assert not await llm.is_sleeping()
    *_, last = [output async for output in generator]
    assert last.outputs[0].finish_reason == "length"
    assert await llm.reset_prefix_cache()
    await llm.check_health()


async def test_conversations_and_tokenizer(llm: AsyncLLM) -> None:
    prompt = await llm.chat_prompt([{"role": "user", "content": "What is 2 + 3?"}])
    *_, last = [output async for output in llm.generate(prompt, GREEDY)]
    assert last.prompt_token_ids == prompt.token_ids
    assert (await llm.get_tokenizer()).encode("Once").ids
    with pytest.raises(ValueError, match="pooling_task"):
        await anext(llm.encode("Once", PoolingParams()))


def test_several_event_loops_one_after_the_other(shared: AsyncLLM, expected: dict[str, tuple[str, list[int]]]) -> None:
    async def abandon() -> None:
        await anext(shared.generate("Once", ENDLESS))

    asyncio.run(abandon())  # the loop ends before the request
    outputs = asyncio.run(read(shared, "Once"))
    assert outputs[-1].outputs[0].token_ids == expected["Once"][1]


async def test_a_killed_core_raises_one_type_in_all_that_wait() -> None:
    llm = make(hash_step_seconds=0.02)
    generators = [llm.generate("Once", ENDLESS) for _ in range(3)]
    await asyncio.gather(*map(anext, generators))
    os.kill(core_pid(llm), signal.SIGKILL)

    async def drain(generator: Any) -> None:
        async for _ in generator:
            pass

    ended = await asyncio.gather(*map(drain, generators), return_exceptions=True)
    assert [type(each) for each in ended] == [EngineDeadError] * 3
    assert all("ended with status -9" in str(each) for each in ended)
    for call in (read(llm, "a"), llm.reset_prefix_cache(), llm.sleep(), llm.check_health()):
        with pytest.raises(EngineDeadError, match="ended with status -9"):
            await call
    llm.close()


async def test_a_core_that_dies_while_paused_fails_the_requests_that_were_kept() -> None:
    llm = make()
    generator = llm.generate("Once", ENDLESS)
    await anext(generator)
    await llm.sleep(0, "keep")
    os.kill(core_pid(llm), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="ended with status -9"):
        async for _ in generator:
            pass
    llm.close()


def test_a_fork_of_the_program_is_refused_and_its_parent_goes_on(
    shared: AsyncLLM, expected: dict[str, tuple[str, list[int]]]
) -> None:
    """The thread stays with the parent: a call in the child waited for ever."""

    async def ask() -> list[int]:
        outputs = [output async for output in shared.generate("Once", GREEDY)]
        return outputs[-1].outputs[0].token_ids

    child = os.fork()
    if not child:
        status = 1
        try:
            asyncio.run(asyncio.wait_for(ask(), 20))
        except EngineDeadError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(ask()) == expected["Once"][1]


@pytest.mark.parametrize("own_process", [True, False])
async def test_closing_fails_what_waits_and_leaves_no_thread_or_process(own_process: bool) -> None:
    before = threading.active_count()
    llm = make(engine_process=own_process, hash_step_seconds=0.02)
    pid = core_pid(llm) if own_process else None
    generator = llm.generate("Once", ENDLESS)
    await anext(generator)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in generator:
            pass
    llm.close()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="closed"):
        await read(llm, "Once")
    assert not llm._thread._thread.is_alive()
    assert pid is None or has_ended(pid)
    assert threading.active_count() <= before + 1  # that of to_thread


async def test_one_that_nobody_refers_to_closes_itself() -> None:
    llm = make()
    pid, reference = core_pid(llm), weakref.ref(llm)
    async with llm:
        await read(llm, "Once")
    assert has_ended(pid)
    llm = make()
    pid, thread = core_pid(llm), llm._thread._thread
    del llm
    gc.collect()
    thread.join()
    assert has_ended(pid)
    assert reference() is None


def test_what_is_wrong_with_a_start_is_raised_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="max_model_len 99999"):
        AsyncLLM(EngineArgs(MODEL, max_model_len=99999))
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == THREAD]


async def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(
    expected: dict[str, tuple[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(engine_process=False)
    engine = llm._thread._engine
    assert engine is not None

    def fail() -> None:
        monkeypatch.undo()
        raise OSError("broken")

    generator = llm.generate("Once", ENDLESS)
    await anext(generator)
    monkeypatch.setattr(engine.client, "get_output", fail)
    with pytest.raises(RuntimeError, match="broken"):
        async for _ in generator:
            pass
    outputs = await read(llm, "Once")
    assert outputs[-1].outputs[0].token_ids == expected["Once"][1]
    llm.close()


async def test_a_call_that_hangs_does_not_keep_a_core_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenloom.offline import async_llm

    monkeypatch.setattr(async_llm, "_CLOSE_SECONDS", 0.05)
    llm = make()
    pid = core_pid(llm)
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(llm.reset_prefix_cache())
    await asyncio.sleep(0)
    await asyncio.to_thread(llm.close)
    with pytest.raises(EngineDeadError):
        await waiting
    assert has_ended(pid)


async def test_the_last_interval_is_logged_without_a_further_request() -> None:
    logged = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Told:
        """Passes the first statistics on."""

        def log(self, stats: EngineStats) -> None:
            assert stats.generation_throughput > 0
            loop.call_soon_threadsafe(logged.set)

    args = EngineArgs(MODEL, worker="hash", engine_process=False, log_stats_interval=1.0)
    async with AsyncLLM(args, stat_loggers=[Told()]) as llm:
        await read(llm, "Once")
        await logged.wait()


SCRIPT = """
import asyncio
from tokenloom import AsyncLLM, EngineArgs, SamplingParams
llm = AsyncLLM(EngineArgs("tokenloom-demo", worker="hash", engine_process={own}))
async def main():
    async for output in llm.generate("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        print(len(output.outputs[0].token_ids) > 0)
        break
asyncio.run(main())
"""


@pytest.mark.parametrize("own", [True, False])
def test_a_program_that_forgets_to_close_it_ends(tmp_path: Path, own: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(own=own))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode, done.stderr) == ("True\n", 0, "")


def piece(text: str, *ids: int, index: int = 0, reason: str | None = None) -> RequestOutput:
    logprobs = [{each: Logprob(-0.5)} for each in ids]
    completion = CompletionOutput(index, text, list(ids), logprobs=logprobs, finish_reason=reason)
    return RequestOutput("r", "p", [1], [completion], finished=reason is not None)


async def test_a_collector_joins_pieces_by_sample() -> None:
    collector = OutputCollector(are_pieces=True)
    assert collector.put(piece("a", 1))
    assert not collector.put(piece("x", 7, index=1))
    assert not collector.put(piece("b", 2, 3, reason="length"))
    output = await collector.get()
    assert isinstance(output, RequestOutput)
    first, second = output.outputs
    assert (first.text, first.token_ids, first.finish_reason) == ("ab", [1, 2, 3], "length")
    assert [list(each) for each in first.logprobs or ()] == [[1], [2], [3]]
    assert (second.text, second.token_ids) == ("x", [7])
    assert output.finished


async def test_a_collector_keeps_the_newest_of_whole_outputs_and_the_error_after_it() -> None:
    collector = OutputCollector(are_pieces=False)
    collector.put(piece("a", 1))
    collector.put(piece("ab", 1, 2))
    assert not collector.put(None, ValueError("late"))
    output = await collector.get()
    assert isinstance(output, RequestOutput)
    assert [each.text for each in output.outputs] == ["ab"]
    for _ in range(2):
        with pytest.raises(ValueError, match="late"):
            await collector.get()


async def test_a_collector_wakes_its_reader_from_another_thread() -> None:
    collector = OutputCollector(are_pieces=True)
    reading = asyncio.create_task(collector.get())
    await asyncio.sleep(0)

    def put() -> None:
        assert collector.put(piece("a", 1))
        collector.loop.call_soon_threadsafe(collector.wake)

    threading.Thread(target=put).start()
    assert (await reading) == piece("a", 1)
