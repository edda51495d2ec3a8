"""Applies the scheduler's rules for requests that are pooled instead of generating tokens."""

from collections.abc import Callable

from ..data.core_pooling_params import ModelPooling, PoolingTask
from ..data.messages import EngineCoreOutput
from ..data.request import Request
from .query_vectors import Floats, QueryVectors

NO_GENERATION = "this model generates no tokens; it serves the pooling tasks {}"


class PooledRequests:
    """Checks pooling requests against what the model pools, and makes their outputs."""

    def __init__(self, model: ModelPooling, max_model_len: int, clock: Callable[[], int]) -> None:
        """``clock`` returns nanoseconds."""
        self.generates = model.generates
        self._model = model
        self._max_model_len = max_model_len
        self._queries = QueryVectors(clock)

    def refusal(self, request: Request) -> str:
        """Return why a request cannot be pooled; empty if it can. A task that reads hidden states of all tokens makes
        the request skip the prefix cache."""
        params = request.pooling_params
        if params is None:
            return "" if self.generates else NO_GENERATION.format(task_names(self._model.tasks))
        if params.task not in self._model.tasks:
            return f"task {params.task.name.lower()} is not among the model's: {task_names(self._model.tasks)}"
        if params.late_interaction is not None and params.task is not PoolingTask.TOKEN_EMBED:
            return "late_interaction is only possible with the task token_embed"
        if params.dimensions is not None and (error := self._wrong_dimensions(params.dimensions)):
            return error
        if request.num_prompt_tokens > self._max_model_len:
            return f"prompt has {request.num_prompt_tokens} tokens; the context holds {self._max_model_len}"
        # A cached block holds KV and no hidden states, and such a task returns or sums the states of all tokens.
        request.skip_reading_prefix_cache = params.task in self._model.whole_prompt
        return ""

    def _wrong_dimensions(self, dimensions: int) -> str:
        """Return why vectors cannot be shortened to this length; empty if they can."""
        allowed = self._model.dimensions
        if allowed and dimensions not in allowed:
            return f"dimensions is {dimensions}; this model's vectors can have {', '.join(map(str, allowed))}"
        if dimensions > self._model.vector_size:
            return f"dimensions is {dimensions}; this model's vectors have {self._model.vector_size}"
        return ""

    def output(self, request: Request, pooled: Floats) -> EngineCoreOutput:
        """Return the output of a request whose prompt is computed; it has an error if its query is not held."""
        output = EngineCoreOutput(request.request_id, [], pooled=pooled)
        assert request.pooling_params is not None
        if (part := request.pooling_params.late_interaction) is not None:
            self._queries.answer(output, part)
        return output


def task_names(tasks: tuple[PoolingTask, ...]) -> str:
    """Return the names of pooling tasks for messages."""
    return ", ".join(task.name.lower() for task in tasks) or "none"
