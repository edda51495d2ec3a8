"""Tests which compiles are begun, shared and dropped; no process runs."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.engine_core.structured_output.fake_compilers import SOON, FakeCompilers, regex
from tokenloom.engine_core.structured_output.compiler import (
    MAX_COMPILED,
    MAX_DEATHS,
    MAX_PENDING_PER_TENANT,
    RESTART_SECONDS,
    CompileQueueFull,
    CompilerKiller,
    GrammarCompiler,
)
from tokenloom.engine_core.structured_output.compiler_process import CompilerUnavailable
from tokenloom.engine_core.structured_output.grammar_backend import CompiledGrammar, GrammarError


@pytest.fixture
def fakes() -> FakeCompilers:
    return FakeCompilers()


@pytest.fixture
def compiler(fakes: FakeCompilers) -> Iterator[GrammarCompiler]:
    with fakes.compiler() as compiler:
        yield compiler


def compile_(compiler: GrammarCompiler, name: str, tenant: str = "a", request_id: str = "") -> Future[CompiledGrammar]:
    """Ask for a grammar. The future holds what the request gets."""
    result: Future[CompiledGrammar] = Future()

    def done(future: Future[CompiledGrammar]) -> None:
        if (error := future.exception()) is not None:
            result.set_exception(error)
        else:
            result.set_result(future.result())

    compiler.compile(regex(name), request_id or name, tenant, done)
    return result


def test_abandoned_compiles_in_the_queue_never_begin(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    names = [f"bomb{n}" for n in range(MAX_PENDING_PER_TENANT)]
    for name in names:
        compile_(compiler, name, "a")
    fakes.until_begun("bomb0", "bomb1")
    for name in names:
        compiler.forget(regex(name), name)
    mine = compile_(compiler, "mine", "b")
    fakes.release("mine")
    fakes.release("bomb0")  # young, so it is left to end
    assert mine.result(SOON)
    assert sorted(fakes.begun) == ["bomb0", "bomb1", "mine"]
    assert len(compiler._known) == 3
    assert compiler._num_due <= MAX_PENDING_PER_TENANT


def test_an_abandoned_compile_that_has_run_for_long_is_ended(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    bombs = [compile_(compiler, name, "a") for name in ("bomb0", "bomb1")]
    fakes.until_begun("bomb0", "bomb1")
    fakes.now = 2 * RESTART_SECONDS
    for name in ("bomb0", "bomb1"):
        compiler.forget(regex(name), name)
    mine = compile_(compiler, "mine", "b")
    fakes.release("mine")
    assert mine.result(SOON)
    assert fakes.num_started == 3
    again = compile_(compiler, "bomb0", "a")
    fakes.release("bomb0")
    assert again.result(SOON), "what was dropped can be compiled later"
    assert all(bomb.done() for bomb in bombs)


def test_a_young_abandoned_compile_is_ended_when_another_one_is_asked_for_later(
    fakes: FakeCompilers, compiler: GrammarCompiler
) -> None:
    for name in ("bomb0", "bomb1"):
        compile_(compiler, name, "a")
    fakes.until_begun("bomb0", "bomb1")
    for name in ("bomb0", "bomb1"):
        compiler.forget(regex(name), name)
    assert set(fakes.running) == {"bomb0", "bomb1"}
    fakes.now = 2 * RESTART_SECONDS
    mine = compile_(compiler, "mine", "b")
    fakes.release("mine")
    assert mine.result(SOON)


def test_a_compile_continues_until_the_last_request_has_left(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    first = compile_(compiler, "common", "a", "first")
    fakes.until_begun("common")
    compile_(compiler, "common", "a", "second")
    last = compile_(compiler, "common", "b", "last")
    fakes.now = 10.0
    compiler.forget(regex("common"), "first")
    compiler.forget(regex("common"), "second")
    assert set(fakes.running) == {"common"}
    fakes.release("common")
    assert last.result(SOON) is first.result(SOON)
    assert (fakes.begun, fakes.num_started) == (["common"], 1)


def test_a_grammar_that_is_ready_is_not_compiled_again(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.release("ready")
    first = compile_(compiler, "ready", "a", "1").result(SOON)
    assert compile_(compiler, "ready", "b", "2").result(SOON) is first
    compiler.forget(regex("ready"), "2")
    assert compile_(compiler, "ready", "b", "3").result(SOON) is first
    assert fakes.begun == ["ready"]


def test_a_wanted_grammar_of_another_tenant_comes_after_one_compile_at_most(
    fakes: FakeCompilers, compiler: GrammarCompiler
) -> None:
    for n in range(24):
        compile_(compiler, f"bomb{n}", "a")
    fakes.until_begun("bomb0", "bomb1")
    mine = compile_(compiler, "mine", "b")
    fakes.release("mine")
    fakes.now += 2.0
    fakes.release("bomb1")
    assert mine.result(SOON)
    second = compile_(compiler, "second", "b")  # it waits for none: one compiler was left to it
    fakes.until_begun("bomb0", "second")
    fakes.release("second")
    assert second.result(SOON)
    fakes.release("bomb0")
    fakes.until_begun("bomb2")


def test_constraints_that_wait_drive_no_compiled_one_out(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.release("mine")
    assert compile_(compiler, "mine", "b").result(SOON)
    for n in range(MAX_COMPILED + 1):
        compile_(compiler, f"bomb{n}", "a")
    assert compile_(compiler, "mine", "b").done()


def test_a_full_queue_refuses_a_tenant_and_serves_others(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    for n in range(2):
        compile_(compiler, f"running{n}", "a")
    fakes.until_begun("running0", "running1")
    for n in range(MAX_PENDING_PER_TENANT):
        compile_(compiler, f"bomb{n}", "a")
    with pytest.raises(CompileQueueFull):
        compile_(compiler, "one more", "a")
    mine = compile_(compiler, "mine", "b")
    fakes.release("mine")
    fakes.release("running0")
    assert mine.result(SOON)
    fakes.release("running1")
    fakes.until_begun("bomb0")
    assert not compile_(compiler, "one more", "a").done()


def test_without_a_process_requests_fail_and_may_be_retried(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.may_start = False
    for _ in range(2):
        with pytest.raises(CompilerUnavailable, match="did not start"):
            compile_(compiler, "a").result(SOON)
    fakes.may_start = True
    fakes.release("a")
    assert compile_(compiler, "a").result(SOON)


@pytest.mark.parametrize(
    "failure", [CompilerUnavailable("the machine is too busy"), OSError("no descriptor is left"), RuntimeError("a bug")]
)
def test_what_is_no_verdict_is_not_kept(fakes: FakeCompilers, compiler: GrammarCompiler, failure: Exception) -> None:
    fakes.release("a")
    fakes.failures["a"] = failure
    with pytest.raises(CompilerUnavailable):
        compile_(compiler, "a").result(SOON)
    assert compile_(compiler, "a").result(SOON)


def test_a_process_that_died_while_it_was_idle_is_not_asked(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.release("a")
    fakes.release("b")
    assert compile_(compiler, "a").result(SOON)
    for process in fakes.started:
        process.died()
    assert compile_(compiler, "b").result(SOON)
    assert fakes.begun == ["a", "b"]
    assert all(process.is_alive for process in compiler._idle)


def test_a_process_that_dies_at_work_is_replaced_at_once(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.release("a")
    fakes.deaths["a"] = MAX_DEATHS - 1
    assert compile_(compiler, "a").result(SOON)
    assert fakes.begun == ["a"] * MAX_DEATHS
    assert not compiler._busy


def test_a_constraint_of_which_processes_die_again_and_again_is_given_up(
    fakes: FakeCompilers, compiler: GrammarCompiler
) -> None:
    fakes.release("a")
    fakes.deaths["a"] = MAX_DEATHS
    with pytest.raises(CompilerKiller, match="3 processes ended"):
        compile_(compiler, "a").result(SOON)
    assert compile_(compiler, "a").result(SOON)  # that was no verdict


def test_a_machine_that_stops_processes_is_no_fault_of_the_constraint(
    fakes: FakeCompilers, compiler: GrammarCompiler
) -> None:
    fakes.release("a")
    fakes.stops, fakes.deaths["a"] = True, MAX_DEATHS
    with pytest.raises(CompilerUnavailable, match="stops the processes") as failure:
        compile_(compiler, "a").result(SOON)
    assert not isinstance(failure.value, CompilerKiller), "the request goes on at another engine"


def test_a_refusal_is_kept(fakes: FakeCompilers, compiler: GrammarCompiler) -> None:
    fakes.release("a")
    fakes.failures["a"] = GrammarError("it takes more than 2 s of processor time to compile")
    for request_id in "12":
        with pytest.raises(GrammarError, match="more than 2 s"):
            compile_(compiler, "a", request_id=request_id).result(SOON)
    assert fakes.begun == ["a"]


@pytest.mark.parametrize("failure", [BlockingIOError("no process is left"), RuntimeError("can't start new thread")])
def test_a_process_that_cannot_start_fails_the_request(
    fakes: FakeCompilers, compiler: GrammarCompiler, failure: Exception
) -> None:
    fakes.release("a")
    fakes.start_failure = failure
    with pytest.raises(CompilerUnavailable):
        compile_(compiler, "a").result(SOON)
    assert compile_(compiler, "a").result(SOON)


def test_a_grammar_that_cannot_be_loaded_here_may_be_tried_again(
    fakes: FakeCompilers, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.release("a")
    with monkeypatch.context() as patch:
        patch.setattr(type(compiler.backend), "load", fail)
        with pytest.raises(CompilerUnavailable, match="could not compile the grammar; retry"):
            compile_(compiler, "a").result(SOON)
    assert compile_(compiler, "a").result(SOON)


def fail(*_: object) -> None:
    raise MemoryError


def test_a_grammar_whose_thread_could_not_start_is_compiled_for_the_next_request(
    fakes: FakeCompilers, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            compile_(compiler, "wanted", "a", "refused")
    fakes.release("wanted")
    assert compile_(compiler, "wanted", "a", "later").result(SOON)
    assert fakes.begun == ["wanted"]
