"""Streaming input: a prompt that goes on after it was answered (``resumable`` requests in vLLM V1)."""

from collections.abc import Iterable
from dataclasses import replace

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import inference_pb2

from ..assistant.message_plans import MessagePlans
from ..generation.job import Job
from .inference_request import read_request


class InputSession:
    """What was said so far, in tokens. Each turn is a request of its own: to the mesh it is like any other, and what it
    repeats is hit in the prefix cache."""

    def __init__(self) -> None:
        self._said: list[int] = []
        self._num_output = 0

    def read_turn(self, request: inference_pb2.GenerateRequest, plans: MessagePlans, timeout: float | None) -> Job:
        """The next turn's job. Raises ``InvalidArgument`` for what no session takes."""
        if (kind := request.WhichOneof("prompt")) not in (None, "text", "token_ids"):
            raise InvalidArgument(f"a turn of a session is text or token_ids, not {kind}", kind)
        if request.n > 1:
            raise InvalidArgument("n must be 1 in a session: only one output can be continued", "n")
        if request.HasField("truncate_prompt_tokens"):
            raise InvalidArgument("truncate_prompt_tokens does not go with a session", "truncate_prompt_tokens")
        job, _ = read_request(request, plans, timeout)
        if not self._said:
            return job
        # What begins a text has been there.
        return replace(job, before=self._said, add_special_tokens=request.add_special_tokens)

    def begin(self, prompt: Iterable[int]) -> None:
        """A turn was taken in: its whole prompt."""
        self._said = list(prompt)
        self._num_output = 0

    def take(self, token_ids: Iterable[int]) -> None:
        """Of its output."""
        before = len(self._said)
        self._said += token_ids
        self._num_output += len(self._said) - before

    def end(self) -> None:
        """The turn is answered. Its last token is not continued, as in vLLM: its KV was never computed."""
        if self._num_output:
            del self._said[-1]
