"""What a client asks a pooling model for, independent of the API that it uses, and the names of the tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2

from .generate_request import Chat, GenerateRequest

_PREFIX: Final = "POOLING_TASK_"
TASKS: Final[dict[str, types_pb2.PoolingTask]] = {
    name.removeprefix(_PREFIX).lower(): cast(types_pb2.PoolingTask, task)
    for name, task in types_pb2.PoolingTask.items()
    if task
}
"""The tasks by their names, as in vLLM."""
NO_GENERATION: Final = "the model does not generate text; its pooling tasks are: {}"


def task_name(task: types_pb2.PoolingTask) -> str:
    return types_pb2.PoolingTask.Name(task).removeprefix(_PREFIX).lower()


def task_names(limits: types_pb2.ModelLimits) -> str:
    """Return the tasks that the model serves."""
    return ", ".join(task_name(task) for task in sorted(limits.pooling_tasks)) or "none"


MAX_INPUTS: Final = 2048
"""Limits the inputs of a call, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A pooling call whose form has been checked, but not yet its values against the model's limits."""

    request: GenerateRequest
    """The prompts, and what is said about them; nothing is generated."""
    params: types_pb2.PoolingParams
    second_texts: Sequence[str] = ()
    """Joined to the prompts, as pairs that the model reads at once; empty: nothing is."""
    keep_first: bool = False
    """Whether a prompt that is cut keeps its first tokens instead of its last ones."""
    prompt_name: str = ""
    """Of the prompt before each text that becomes a vector; empty: the model's default, if it has one."""
    num_queries: int = 0
    """For late interaction: the first so many prompts are queries, the others documents."""

    @property
    def makes_vectors(self) -> bool:
        return self.params.task in (types_pb2.POOLING_TASK_EMBED, types_pb2.POOLING_TASK_TOKEN_EMBED)

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.request.prompts, Chat) else len(self.request.prompts)


def check_count(count: int, field: str) -> None:
    """Raise ``InvalidArgument`` for a call without inputs, or with too many."""
    if not count:
        raise InvalidArgument(f"{field} is empty; at least one input is needed", field)
    if count > MAX_INPUTS:
        raise InvalidArgument(f"{field} may hold at most {MAX_INPUTS} inputs, not {count}", field)
