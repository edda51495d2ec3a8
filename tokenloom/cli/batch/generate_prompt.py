"""Reads a line of prompts for ``tokenloom generate``, and makes the line that answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenloom.offline.outputs import CompletionOutput, RequestOutput
from tokenloom.offline.sampling_params import SamplingParams

from .jsonl import parse

if TYPE_CHECKING:  # it imports torch
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
