"""Reads the prompts of ``tokenloom generate``, runs them concurrently, and yields the answers in their order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenloom import LLM
from tokenloom.offline.outputs import CompletionOutput, RequestOutput
from tokenloom.offline.sampling_params import SamplingParams
from tokenloom.request.sampling_params import sample_seed

from .jsonl import parse

if TYPE_CHECKING:
    from tokenloom.offline.prompts import Message, Prompt

_KEYS = ("id", "prompt", "prompt_token_ids", "messages", "sampling_params", "metadata")
_FORMS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class PromptLine:
    """Holds a prompt from the file, in one of its three forms."""

    id: str | int
    """The prompt's id, or the number of its line if it has none."""
    prompt: "Prompt | None" = None
    messages: "list[Message] | None" = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that it overrides."""
    metadata: Any = None
    """Repeated in the answer."""

    def sampling_params(self, common: Mapping[str, Any], seed: int) -> SamplingParams:
        """Combine the common parameters with those of the line. Raises ``ValueError``."""
        try:
            return SamplingParams(**{"seed": seed, **common, **self.sampling})
        except TypeError as error:  # an unknown name
            raise ValueError(f"sampling_params: {error}") from None


class BadLine(ValueError):
    """The line is not a valid prompt; the message says why."""

    def __init__(self, id: str | int, message: str) -> None:
        super().__init__(message)
        self.id = id


def read_prompt_line(number: int, line: str) -> PromptLine:
    """Read a JSON string, or an object with ``prompt``, ``prompt_token_ids`` or ``messages``. Raises `BadLine`."""
    try:
        value = parse(line)
    except ValueError as error:
        raise BadLine(number, f"line {number} {error}") from None
    if isinstance(value, str):
        return PromptLine(number, value)
    if not isinstance(value, dict):
        raise BadLine(number, f"line {number} must be a string or an object")
    id = value.get("id", number)
    if not isinstance(id, (str, int)):
        raise BadLine(number, f"line {number}: id must be a string or an integer")
    for key in value:
        if key not in _KEYS:
            raise BadLine(id, f"line {number}: {key!r} is unknown; expected {', '.join(_KEYS)}")
    forms = [key for key in _FORMS if key in value]
    if len(forms) != 1:
        raise BadLine(id, f"line {number} needs exactly one of {', '.join(_FORMS)}")
    sampling = value.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise BadLine(id, f"line {number}: sampling_params must be an object")
    messages = value.get("messages")
    if messages is not None and not isinstance(messages, list):
        raise BadLine(id, f"line {number}: messages must be a list")
    prompt = None if messages is not None else _prompt(value)
    return PromptLine(id, prompt, messages, sampling, value.get("metadata"))


def answer_line(line: PromptLine, output: RequestOutput) -> dict[str, Any]:
    """Make the line that answers a prompt."""
    num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
    usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": num_tokens}
    answer = {"id": line.id, "outputs": [_sample(sample) for sample in output.outputs], "usage": usage}
    return answer if line.metadata is None else {**answer, "metadata": line.metadata}


def error_line(id: str | int, message: str) -> dict[str, Any]:
    """Make the line for a prompt that failed."""
    return {"id": id, "error": {"message": message}}


def _prompt(value: Mapping[str, Any]) -> "Prompt":
    prompt: Prompt = {key: value[key] for key in ("prompt", "prompt_token_ids") if key in value}  # type: ignore[assignment]
    return prompt


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    line: dict[str, Any] = {
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        line["cumulative_logprob"] = sample.cumulative_logprob
        line["logprobs"] = [
            {str(token_id): {"logprob": each.logprob, "rank": each.rank} for token_id, each in position.items()}
            for position in sample.logprobs
        ]
    return line


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
