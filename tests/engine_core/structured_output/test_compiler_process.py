import os
import signal
import sys
from collections.abc import Iterator

import msgspec
import pytest

from tests.engine_core.structured_output.helpers import EOS, PERSON, VOCAB_SIZE, allowed, backend, config, json_schema
from tokenloom.engine_core.data.core_params import GrammarKind, StructuredOutput
from tokenloom.engine_core.structured_output.compiler_process import (
    CompilerDied,
    CompilerProcess,
    CompilerUnavailable,
    Setup,
    make_backend,
)
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError
from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend


def test_llguidance_is_the_default_backend() -> None:
    assert isinstance(make_backend(config(), VOCAB_SIZE), LLGuidanceBackend)


def test_a_missing_backend_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(GrammarError, match=r"tokenloom\[xgrammar\]"):
        make_backend(msgspec.structs.replace(config(), backend="xgrammar"), VOCAB_SIZE)


@pytest.fixture
def process() -> Iterator[CompilerProcess]:
    process = CompilerProcess(Setup(config(), VOCAB_SIZE))
    yield process
    process.kill()


def test_it_prepares_what_the_engine_loads(process: CompilerProcess) -> None:
    prepared = process.prepare(json_schema(PERSON))
    assert EOS not in allowed(backend().load(prepared).start())
    assert process.prepare(json_schema(PERSON)) == prepared


def test_a_refusal_leaves_it_alive(process: CompilerProcess) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        process.prepare(StructuredOutput(GrammarKind.REGEX, "(a"))
    assert process.is_alive
    assert process.prepare(StructuredOutput(GrammarKind.REGEX, "a"))


def test_a_constraint_that_takes_too_much_ends_the_process_in_time(process: CompilerProcess) -> None:
    with pytest.raises(GrammarError, match=r"too much memory|more than 2 s"):
        process.prepare(json_schema({"type": "integer", "multipleOf": 99_999_989}))
    assert not process.is_alive


HARD = json_schema({"type": "integer", "multipleOf": 59_999})


def test_its_processor_time_is_limited() -> None:
    process = CompilerProcess(Setup(config(), VOCAB_SIZE, seconds=0.05))
    with pytest.raises(GrammarError, match="more than 2 s of processor time") as refusal:
        process.prepare(HARD)
    assert not isinstance(refusal.value, CompilerUnavailable)
    assert not process.is_alive


def test_on_a_busy_machine_a_constraint_is_not_judged() -> None:
    process = CompilerProcess(Setup(config(), VOCAB_SIZE, seconds=1000, wait_seconds=0.05))
    with pytest.raises(CompilerUnavailable, match="too busy to compile"):
        process.prepare(HARD)
    assert not process.is_alive


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGUSR1])
def test_a_process_that_was_ended_has_judged_nothing(process: CompilerProcess, signal_: signal.Signals) -> None:
    process._process.send_signal(signal_)
    process._process.wait()
    assert not process.is_alive
    with pytest.raises(CompilerDied, match="was ended; retry"):
        process.prepare(json_schema(PERSON))


def test_a_stopped_process_is_ended_when_it_owes_an_answer(process: CompilerProcess) -> None:
    process._process.send_signal(signal.SIGSTOP)
    os.waitpid(process._process.pid, os.WUNTRACED)
    assert not process.is_alive
    with pytest.raises(CompilerDied, match="was ended; retry"):
        process.prepare(json_schema(PERSON))
    assert process.was_stopped


def test_a_tokenizer_that_changed_is_no_fault_of_a_constraint() -> None:
    changed = msgspec.structs.replace(config(), tokenizer_digest=b"other")
    with pytest.raises(CompilerUnavailable, match="was changed"):
        CompilerProcess(Setup(changed, VOCAB_SIZE))
    with pytest.raises(CompilerUnavailable, match="no longer be read"):
        CompilerProcess(Setup(msgspec.structs.replace(config(), tokenizer="/nowhere"), VOCAB_SIZE))
