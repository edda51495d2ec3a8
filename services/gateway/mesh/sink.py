"""Defines what receives the output of requests, whichever output processors run them."""

from collections.abc import Sequence
from typing import Protocol

from tokenloom.request import errors
from tokenloom.v1 import output_processor_pb2, types_pb2


class Sink(Protocol):
    """Receives the output of one client request, by index. Its methods are called by streams and never wait."""

    @property
    def failed(self) -> bool:
        """Whether the request has ended with an error."""

    def num_tokens(self, index: int) -> int:
        """Return how many tokens of an index arrived."""

    def journal(self, index: int, sample_index: int) -> output_processor_pb2.SampleJournal:
        """Return what another output processor needs to continue an index."""

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
        """Add text and tokens. ``ends``: :meth:`finish` follows at once."""

    def put_prompt(self, index: int, logprobs: output_processor_pb2.SlotTextLogprobs) -> None:
        """Add log probabilities of an index's prompt."""

    def put_pooled(self, index: int, part: types_pb2.Pooled) -> None:
        """Add the result of an index, or the next part of it."""

    def finish(self, index: int, finished: output_processor_pb2.RequestFinished) -> None:
        """End an index."""

    def fail(self, error: errors.TokenloomError) -> None:
        """End the request. Only the first error counts."""
