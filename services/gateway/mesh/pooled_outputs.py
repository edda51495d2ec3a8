"""Collects what the requests of one pooling call return."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1 import output_processor_pb2, types_pb2

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class PooledResult:
    """Holds the result of one prompt.

    Attributes:
        shape: [], [n] or [tokens, n].
        data: float32 numbers in row-major order, little-endian.
    """

    shape: tuple[int, ...]
    data: bytes


class PooledOutputs:
    """Joins the parts of the results for its only reader. A result that another engine begins anew, at offset 0,
    replaces the parts before it. Fulfils ``Sink``.

    Attributes:
        results: By prompt; None: it has not ended, or keeps its result at the engine.
        lost: The prompts whose query an engine did not hold any more.
        num_live: Prompts that were begun and have not ended.
        cached_tokens: Prompt tokens that were found in a cache.
        weights_version: Which weights computed all results; empty: none have, or the engines have no weights.
    """

    is_superseded = is_unattended = False
    """No other call can take it over."""

    def __init__(
        self, num_prompts: int, max_bytes: int, on_end: Callable[[], object], on_left: Callable[[int], object]
    ) -> None:
        """``max_bytes``: limits all results together. ``on_end``: called when a prompt has ended with a result.
        ``on_left``: called with each prompt that is in work no more."""
        self.results: list[PooledResult | None] = [None] * num_prompts
        self.lost: list[int] = []
        self.num_live = self.cached_tokens = 0
        self.weights_version = ""
        self._parts: dict[int, list[types_pb2.Pooled]] = {}
        self._bytes_left = self._max_bytes = max_bytes
        self._on_end = on_end
        self._on_left = on_left
        self._error: errors.TokenloomError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._most_live = 0

    @property
    def failed(self) -> bool:
        return self._error is not None

    async def wait(self, most_live: int) -> None:
        """Return when at most so many prompts are live. Raises the error that ended the call."""
        while self._error is None and self.num_live > most_live:
            self._waiter, self._most_live = asyncio.get_running_loop().create_future(), most_live
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    def put_pooled(self, index: int, part: types_pb2.Pooled) -> None:
        """Add a part of a result. Raises ``WrongFrame`` for missing or repeated numbers: a wrong vector is worse than a
        pause."""
        parts = self._parts.setdefault(index, [])
        if not part.offset:
            self._bytes_left += _size(parts)
            parts.clear()
        if part.offset * _FLOAT_BYTES != _size(parts):
            raise WrongFrame(f"expected number {_size(parts) // _FLOAT_BYTES} of a result")
        self._bytes_left -= len(part.data)
        if self._bytes_left < 0:
            message = f"the results have more than {self._max_bytes} bytes; split the request"
            self.fail(errors.InvalidArgument(message, "input"))
            return
        parts.append(part)

    def finish(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """End a prompt. Raises ``WrongFrame`` for a result that is not complete."""
        parts = self._parts.get(index, [])
        is_result = not finished.HasField("error") and finished.reason != types_pb2.FINISH_REASON_ABORT
        if is_result and parts and _size(parts) != _FLOAT_BYTES * prod(parts[0].shape):
            raise WrongFrame(f"a result of shape {list(parts[0].shape)} has {_size(parts)} bytes")
        self.num_live -= 1
        self._on_left(index)
        self._parts.pop(index, None)
        error = wire_errors.from_proto(finished.error) if finished.HasField("error") else None
        if isinstance(error, errors.QueryLost):
            self.lost.append(index)
        elif error is not None:
            self.fail(error)
        elif finished.reason == types_pb2.FINISH_REASON_ABORT:  # an operator paused the engines
            self.fail(errors.Unavailable("The engines ended the request before its result; retry."))
        elif self.weights_version not in ("", finished.weights_version):
            # Vectors of two versions cannot be compared, and an answer does not say which is which.
            self.fail(errors.WeightsReplaced("The engines' weights were replaced during the call; send it again."))
        elif parts:
            self.results[index] = PooledResult(tuple(parts[0].shape), b"".join(part.data for part in parts))
            self._on_end()
        if is_result:
            self.weights_version = finished.weights_version
        self.cached_tokens += finished.cached_tokens
        if self.num_live <= self._most_live:
            self._wake()

    def fail(self, error: errors.TokenloomError) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    def num_tokens(self, index: int) -> int:
        """Return 0: nothing is generated."""
        return 0

    def journal(self, index: int, sample_index: int, start: int = 0) -> output_processor_pb2.SampleJournal:
        """Return nothing: another output processor begins the prompt anew."""
        return output_processor_pb2.SampleJournal()

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
        raise WrongFrame("tokens arrived for a pooling request")

    def put_prompt(self, index: int, logprobs: output_processor_pb2.SlotTextLogprobs) -> None:
        raise WrongFrame("log probabilities arrived for a pooling request")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(parts: Sequence[types_pb2.Pooled]) -> int:
    return sum(len(part.data) for part in parts)
