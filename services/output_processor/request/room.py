"""Bounds the requests that are live in this process, by number and by the memory of their prompts. No I/O."""

from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.v1.output_processor_pb2 import Submit

_TOKEN_BYTES = 4
_LIMIT_SHARE = 0.5
"""Of the process's memory limit. The rest is for the program and the vocabulary, output, requests that are kept for
clients that return, and messages in transit."""
_DEFAULT_BYTES = 1 << 30
"""Without a memory limit: as on a host of one's own."""


def default_prompt_bytes(memory_limit: int | None) -> int:
    """Return the memory for the prompts of live requests, in bytes. ``memory_limit``: of the process; None: none."""
    return _DEFAULT_BYTES if memory_limit is None else int(memory_limit * _LIMIT_SHARE)


def num_samples(submit: Submit) -> int:
    """Return how many outputs a request has."""
    return max(submit.num_samples, 1)


def prompt_bytes(submit: Submit) -> int:
    """Return the memory of a request's prompt while it is live, in bytes: that of its Submit, and of an ``AddRequest``
    for each sample, which waits while the engine does not read."""
    prompt = submit.prompt
    size = _TOKEN_BYTES * len(prompt.token_ids)
    if prompt.embeds:
        size += sum(len(span.rows) for span in prompt.embeds)
    return size * (1 + num_samples(submit))


@dataclass(slots=True)
class Place:
    """Holds what a request takes up until its last sample has ended."""

    num_live: int
    num_bytes: int


class Room:
    """Counts what live requests take up.

    Attributes:
        num_live: Samples that have not ended.
        num_bytes: Memory of the prompts of requests that have not ended.
    """

    def __init__(self, max_requests: int, max_prompt_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_prompt_bytes
        self.num_live = self.num_bytes = 0

    def check(self, submit: Submit) -> None:
        """Raise ``TryElsewhere`` if a request does not fit. One whose prompt alone is over the limit is taken while no
        other request is live: it would fit nowhere else either."""
        if self.num_live + num_samples(submit) > self._max_requests:
            raise errors.TryElsewhere(f"The output processor already runs {self._max_requests} requests; retry.")
        if self.num_live and self.num_bytes + prompt_bytes(submit) > self._max_bytes:
            megabytes = self._max_bytes / (1 << 20)
            raise errors.TryElsewhere(f"The output processor's prompts already fill {megabytes:.3g} MiB; retry.")

    def take(self, submit: Submit, num_live: int) -> Place:
        """Count a request of which so many samples run."""
        place = Place(num_live, prompt_bytes(submit))
        self.num_live += num_live
        self.num_bytes += place.num_bytes
        return place

    def leave(self, place: Place) -> None:
        """Count the end of one sample; the last one returns the memory of the prompt."""
        self.num_live -= 1
        place.num_live -= 1
        if not place.num_live:
            self.num_bytes -= place.num_bytes
