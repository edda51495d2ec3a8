"""The work of ``tokenloom generate``: many prompts at once, their answers in the order of the prompts."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenloom import LLM
from tokenloom.request.sample_seed import sample_seed

from .generate_prompt import BadLine, PromptLine, answer_line, error_line, read_prompt_line

IN_FLIGHT = 256
"""Prompts in the engine, of which some wait: it never runs dry."""
UNWRITTEN = 1024
"""Answers that wait for one before them: they would be computed again after a kill, so there are not more."""


@dataclass
class _Slot:
    """The answer to one line, once there is one."""

    answer: dict[str, Any] | None = None


def generate_lines(
    llm: LLM,
    lines: Iterable[tuple[int, str]],
    sampling: Mapping[str, Any],
    seed: int,
    on_done: Callable[[dict[str, Any]], None],
) -> Iterator[dict[str, Any]]:
    """The answer to each line, in their order; a line that is wrong has an error instead.

    Args:
        lines: With their numbers, which with `seed` decide what they sample: a run that goes on later does the same.
        sampling: Of lines that have no parameters of their own.
        on_done: Told each answer as soon as it is there, in any order.
    """
    numbered, slots = iter(lines), deque[_Slot]()
    in_flight: dict[str, tuple[PromptLine, _Slot]] = {}
    is_more = True
    while True:
        while is_more and len(in_flight) < IN_FLIGHT and len(slots) < UNWRITTEN:
            if (numbered_line := next(numbered, None)) is None:
                is_more = False
                break
            slots.append(slot := _Slot())
            try:
                number, text = numbered_line
                line = read_prompt_line(number, text)
                in_flight[_enqueue(llm, line, sampling, sample_seed(seed, number))] = line, slot
            except ValueError as error:
                slot.answer = error_line(error.id if isinstance(error, BadLine) else line.id, str(error))
                on_done(slot.answer)
        for output in llm.next_finished():
            line, slot = in_flight.pop(output.request_id)
            slot.answer = answer_line(line, output)
            on_done(slot.answer)
        while slots and (answer := slots[0].answer) is not None:
            slots.popleft()
            yield answer
        if not slots and not is_more:
            return


def _enqueue(llm: LLM, line: PromptLine, sampling: Mapping[str, Any], seed: int) -> str:
    params = line.sampling_params(sampling, seed)
    if line.messages is not None:
        return llm.enqueue_chat(line.messages, params)
    assert line.prompt is not None
    return llm.enqueue(line.prompt, params)
