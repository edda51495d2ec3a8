"""What arrived for one client request and is not sent yet: merged, so that a slow client costs its own output only."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from tokenloom.request import errors
from tokenloom.v1 import output_processor_pb2


class Delta(msgspec.Struct):
    """New output of one index since the last time it was taken. There is one for each token, and a dataclass would take
    four times as long to make."""

    index: int
    token_index: int
    """Of the first of ``token_ids`` in the whole output."""
    text: str = ""
    token_ids: list[int] = []
    finished: output_processor_pb2.RequestFinished | None = None
    logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = ()
    """Of ``token_ids``, in order, when asked for."""
    prompt_logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = ()
    """Of the prompt, with or before the first tokens of its first sample."""


Outlet = Callable[[Delta], bool]
"""Takes output on its way to the client at once; False: not now, the client is slow."""


class Collector:
    """Joins the outputs of one client request (one index for each sample of each prompt) for its only reader.

    Writers never wait. What piles up while the reader waits for its client is merged into one delta an index, so the
    bound is the output itself: ``max_tokens`` for each index.
    """

    def __init__(self, num_outputs: int) -> None:
        self._pending: dict[int, Delta] = {}
        self._num_tokens = [0] * num_outputs
        self._live = num_outputs
        self._error: errors.TokenloomError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outlet: Outlet | None = None

    @property
    def done(self) -> bool:
        """Whether every index has ended and all of it was taken."""
        return self._live == 0 and not self._pending

    def put(
        self,
        index: int,
        text: str,
        token_index: int,
        token_ids: list[int],
        *,
        logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = (),
        ends: bool = False,
    ) -> None:
        """Adds output. Tokens that are missing or doubled fail the whole request: wrong text is worse than an error.

        ``ends``: :meth:`finish` follows at once; both then become one delta.
        """
        if token_index != self._num_tokens[index]:
            self.fail(errors.Internal(f"output token {self._num_tokens[index]} expected, {token_index} arrived"))
            return
        self._num_tokens[index] += len(token_ids)
        delta = self._pending.get(index)
        if delta is not None:
            delta.text += text
            delta.token_ids += token_ids
            if logprobs:
                delta.logprobs = [*delta.logprobs, *logprobs]
            return
        delta = Delta(index, token_index, text, token_ids, None, logprobs)
        if ends or self._pending or self._outlet is None or not self._pour(delta, self._outlet):
            self._pending[index] = delta
            self._wake()

    def put_prompt(self, index: int, logprobs: output_processor_pb2.SlotTextLogprobs) -> None:
        """Adds what is told of an index's prompt."""
        delta = self._pending.setdefault(index, Delta(index, self._num_tokens[index]))
        delta.prompt_logprobs = [*delta.prompt_logprobs, logprobs]
        self._wake()

    def finish(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """Ends an index. An error of one index is an error of the request."""
        if finished.HasField("error"):
            self.fail(errors.from_proto(finished.error))
            return
        if finished.completion_tokens != self._num_tokens[index]:
            self.fail(
                errors.Internal(f"{finished.completion_tokens} output tokens sent, {self._num_tokens[index]} arrived")
            )
            return
        delta = self._pending.setdefault(index, Delta(index, self._num_tokens[index]))
        assert delta.finished is None, "an index ends once"
        delta.finished = finished
        self._live -= 1
        self._wake()

    def fail(self, error: errors.TokenloomError) -> None:
        """Ends the request; the first error stays."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self, outlet: Outlet | None = None) -> list[Delta]:
        """Waits for output and takes all of it, at most one delta an index. Raises what :meth:`fail` was given.

        While it waits, what ``outlet`` takes is done with: the reader wakes for an end, an error or a slow client.
        """
        while not self._pending and self._error is None:
            assert self._waiter is None, "a collector has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            self._outlet = outlet
            try:
                await self._waiter
            finally:
                self._waiter = self._outlet = None
        if self._error is not None:
            raise self._error
        taken = list(self._pending.values())
        self._pending = {}
        return taken

    def _pour(self, delta: Delta, outlet: Outlet) -> bool:
        try:
            return outlet(delta)
        except Exception as error:  # one request's fault never ends the stream of all
            self.fail(errors.of_exception(error))
            return True

    def _wake(self) -> None:
        self._outlet = None  # what comes before the reader does waits for it
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
