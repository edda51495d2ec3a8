"""The order of answers, with an engine that ends prompts as the test wants."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.cli.batch import generate_run
from tokenloom.offline.outputs import CompletionOutput, RequestOutput
from tokenloom.offline.sampling_params import SamplingParams


class FakeLLM:
    """Ends in-flight prompts in the order that `picks` draw."""

    def __init__(self, picks: Iterator[int]) -> None:
        self._picks = picks
        self.live: list[str] = []
        self.most = 0
        self._count = 0

    def enqueue(self, prompt: Any, params: SamplingParams) -> str:
        self._count += 1
        self.live.append(str(self._count))
        self.most = max(self.most, len(self.live))
        return self.live[-1]

    def next_finished(self) -> list[RequestOutput]:
        if not self.live:
            return []
        ended = self.live.pop(next(self._picks, 0) % len(self.live))
        return [RequestOutput(ended, None, [1], [CompletionOutput(0, ended, [2])], True)]


@given(
    num_lines=st.integers(0, 40),
    wrong=st.sets(st.integers(1, 40)),
    picks=st.lists(st.integers(0, 100), max_size=60),
    limits=st.tuples(st.integers(1, 8), st.integers(1, 12)),
)
def test_answers_come_in_the_order_of_their_lines(
    num_lines: int, wrong: set[int], picks: list[int], limits: tuple[int, int]
) -> None:
    llm: Any = FakeLLM(iter(picks))
    lines = [(number, "{" if number in wrong else '"x"') for number in range(1, num_lines + 1)]
    done: list[dict[str, Any]] = []
    run = SimpleNamespace(IN_FLIGHT=generate_run.IN_FLIGHT, UNWRITTEN=generate_run.UNWRITTEN)
    generate_run.IN_FLIGHT, generate_run.UNWRITTEN = limits
    try:
        answers = list(generate_run.generate_lines(llm, lines, {}, 0, done.append))
    finally:
        generate_run.IN_FLIGHT, generate_run.UNWRITTEN = run.IN_FLIGHT, run.UNWRITTEN
    assert [answer["id"] for answer in answers] == list(range(1, num_lines + 1))
    assert {answer["id"] for answer in answers if "error" in answer} == wrong & set(range(1, num_lines + 1))
    assert sorted(answer["id"] for answer in done) == list(range(1, num_lines + 1))
    assert llm.most <= min(limits)
