"""Runs the prompts of ``tokenloom generate`` concurrently, and yields the answers in the order of the prompts."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenloom import LLM
from tokenloom.request.sample_seed import sample_seed

from .generate_prompt import BadLine, PromptLine, answer_line, error_line, read_prompt_line

IN_FLIGHT = 256
"""Prompts in the engine. Some of them wait, so that the batch stays full."""
UNWRITTEN = 1024
"""Limit on answers that wait for an earlier one; they would have to be computed again after an interrupt."""


@dataclass
class _Slot:
    """Holds the answer to one line once it is computed."""

    answer: dict[str, Any] | None = None


def generate_lines(
    llm: LLM,
    lines: Iterable[tuple[int, str]],
    sampling: Mapping[str, Any],
    seed: int,
    on_done: Callable[[dict[str, Any]], None],
) -> Iterator[dict[str, Any]]:
    """Yield the answer to each line in order; an invalid line gets an error.

    Args:
        lines: Lines with their numbers. Number and `seed` determine the samples, so a resumed run gives the same.
        sampling: Parameters of lines that set none.
        on_done: Called with each answer as soon as it is computed, in any order.
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
            number, text = numbered_line
            id: str | int = number
            try:
                line = read_prompt_line(number, text)
                id = line.id
                in_flight[_enqueue(llm, line, sampling, sample_seed(seed, number))] = line, slot
            except BadLine as error:
                slot.answer = error_line(error.id, str(error))
            except ValueError as error:
                slot.answer = error_line(id, str(error))
            except Exception as error:  # the run goes on, and its end says that lines failed
                slot.answer = error_line(id, f"internal error: {type(error).__name__}: {error}")
            if slot.answer is not None:
                on_done(slot.answer)
        for output in llm.next_finished():
            line, slot = in_flight.pop(output.request_id)
            slot.answer = answer_line(line, output) if output.error is None else error_line(line.id, output.error)
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
