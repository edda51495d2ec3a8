"""The example of an evaluation asks every question once, a bounded number at a time, and ends answers early."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom import EngineArgs, LLMEngine

sys.path.append(str(Path(__file__).parents[2]))  # `examples` is no part of the package

from examples.evaluation_loop import evaluate


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    made = LLMEngine(EngineArgs("tokenloom-demo", worker="hash"))
    yield made
    made.close()


def test_every_question_is_asked_and_few_at_a_time(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    live, aborted = [], []
    step, abort = engine.step, engine.abort_request

    def watched() -> object:
        live.append(engine.get_num_unfinished_requests())
        return step()

    monkeypatch.setattr(engine, "step", watched)
    monkeypatch.setattr(engine, "abort_request", lambda name: aborted.extend(abort(name)))
    # Every text holds the empty one, so the first of these ends with its first piece; no text holds the second.
    questions = [("What is 1 + 1?", ""), ("What is 2 + 2?", "\x00"), ("What is 3 + 3?", "\x00")]
    answered = list(evaluate(engine, questions, at_once=2))
    assert sorted(asked.question for asked in answered) == [question for question, _ in questions]
    assert [asked.question for asked in answered if asked.is_right] == ["What is 1 + 1?"]
    assert max(live) == 2
    assert "abort" in {output.outputs[0].finish_reason for output in aborted}  # type: ignore[union-attr]
    assert not engine.has_unfinished_requests()
