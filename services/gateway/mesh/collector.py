"""Holds the output of a request until it is sent, merged, so that a slow client delays only its own output."""

import asyncio
from array import array
from collections.abc import Callable, Sequence

import msgspec

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1 import output_processor_pb2, types_pb2

_ENDS = frozenset(
    {
        types_pb2.FINISH_REASON_STOP,
        types_pb2.FINISH_REASON_LENGTH,
        types_pb2.FINISH_REASON_ABORT,
        types_pb2.FINISH_REASON_REPETITION,
    }
)
"""The reasons of an output that ends without an error."""


class Delta(msgspec.Struct):
    """New output of one index. A msgspec struct: each token makes one, and a dataclass takes four times as long."""

    index: int
    token_index: int
    """Position of the first of ``token_ids`` in the whole output."""
    text: str = ""
    token_ids: list[int] = []
    finished: output_processor_pb2.RequestFinished | None = None
    logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = ()
    """For ``token_ids``, in order, when asked for."""
    prompt_logprobs: Sequence[output_processor_pb2.SlotTextLogprobs] = ()
    """For the prompt; with or before the first tokens of its first sample."""


Parts = Sequence[output_processor_pb2.SlotTextLogprobs]

Outlet = Callable[[Delta], bool]
"""Sends output to the client at once and returns True, or returns False while the client is slow."""


class Collector:
    """Joins the outputs of one client request (one index for each sample of each prompt) for its only reader.

    Writers never wait. Output that arrives while the reader waits for its client is merged into one delta per index, so
    it is bounded by ``max_tokens`` for each index. So are the journals of what arrived: 4 bytes for each token. Fulfils
    ``Sink``.

    Attributes:
        is_superseded: A later call runs the request, so that it is not sent again for this one.
        is_unattended: The connection of its client has ended, and the client may come back.
    """

    def __init__(self, num_outputs: int) -> None:
        self._pending: dict[int, Delta] = {}
        self._token_ids: list[array[int]] = []
        for _ in range(num_outputs):
            self._token_ids.append(array("I"))
        self._text_bytes = [0] * num_outputs
        self._ended: list[output_processor_pb2.RequestFinished | None] = [None] * num_outputs
        self._live = num_outputs
        self._error: errors.TokenloomError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outlet: Outlet | None = None
        self.is_superseded = self.is_unattended = False

    @property
    def done(self) -> bool:
        """Whether every index has ended and all output was taken."""
        return self._live == 0 and not self._pending

    @property
    def failed(self) -> bool:
        """Whether the request has ended with an error."""
        return self._error is not None

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of an index arrived."""
        return len(self._token_ids[index])

    def token_ids(self, index: int) -> "array[int]":
        """Return the tokens of an index that arrived."""
        return self._token_ids[index]

    def journal(self, index: int, sample_index: int, start: int = 0) -> output_processor_pb2.SampleJournal:
        """Return what arrived of an index, as an output processor needs it to continue the sample from there. Of its
        tokens only those from ``start`` on."""
        token_ids = self._token_ids[index]
        return output_processor_pb2.SampleJournal(
            sample_index=sample_index,
            token_ids=token_ids[start:] if start else token_ids,
            emitted_text_bytes=self._text_bytes[index],
            finished=self._ended[index] is not None,
            end=self._ended[index],
        )

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
        """Add output. Raises ``WrongFrame`` for missing or repeated tokens: wrong text is worse than a pause.

        ``ends``: :meth:`finish` follows at once, and both become one delta.
        """
        journal = self._token_ids[index]
        if token_index != len(journal):
            raise WrongFrame(f"expected output token {len(journal)}, received {token_index}")
        journal.fromlist(token_ids)
        self._text_bytes[index] += len(text) if text.isascii() else len(text.encode())
        delta = self._pending.get(index)
        if delta is not None:
            delta.text += text
            delta.token_ids += token_ids
            if logprobs:
                delta.logprobs = _extended(delta.logprobs, logprobs)
            return
        delta = Delta(index, token_index, text, token_ids, None, logprobs)
        # What is pending comes first: written past it, newer text would overtake older text of the same output.
        if ends or self._pending or self._outlet is None or not self._pour(delta, self._outlet):
            self._pending[index] = delta
            self._wake()

    def put_prompt(self, index: int, logprobs: output_processor_pb2.SlotTextLogprobs) -> None:
        """Add log probabilities of an index's prompt."""
        delta = self._pending.setdefault(index, Delta(index, self.num_tokens(index)))
        delta.prompt_logprobs = _extended(delta.prompt_logprobs, [logprobs])
        self._wake()

    def put_pooled(self, index: int, part: types_pb2.Pooled) -> None:
        """Refuse it: the request generates."""
        raise WrongFrame("a result was pooled from a request that generates")

    def finish(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """End an index. An error of one index is an error of the request. Raises ``WrongFrame`` if it cannot end."""
        if finished.HasField("error"):
            self.fail(wire_errors.from_proto(finished.error))
            return
        if finished.reason not in _ENDS:
            raise WrongFrame(f"{finished.reason} is no reason to finish")
        num_tokens = self.num_tokens(index)
        if finished.completion_tokens != num_tokens or self._ended[index] is not None:
            raise WrongFrame(f"{finished.completion_tokens} output tokens were sent, {num_tokens} arrived")
        delta = self._pending.setdefault(index, Delta(index, num_tokens))
        delta.finished = finished
        self._ended[index] = finished
        self._live -= 1
        self._wake()

    def fail(self, error: errors.TokenloomError) -> None:
        """End the request. Only the first error is kept."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self, outlet: Outlet | None = None) -> list[Delta]:
        """Wait for output and return all of it, at most one delta per index. Raises the error given to :meth:`fail`.

        While it waits, output goes to ``outlet``: the reader wakes only for an end, an error or a slow client.
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
        except Exception as error:  # an error of one request must not end the stream of all
            self.fail(wire_errors.of_exception(error))
            return True

    def _wake(self) -> None:
        self._outlet = None  # output that arrives before the reader runs is left to the reader
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _extended(held: Parts, more: Parts) -> Parts:
    """Return both, in the list that a delta holds already: a copy for each token would take quadratic time."""
    if not isinstance(held, list):
        return list(more)
    held += more
    return held
