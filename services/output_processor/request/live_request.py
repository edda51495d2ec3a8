"""Bounds the requests that are live in this process, by number and by the memory of their prompts. No I/O."""

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit, Reservation
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
    # Counting requests alone was not enough: 4,096 prompts of 32,000 tokens, far below --max-requests, fill the 512 MiB
    # of an output processor's container.
    return size * (1 + num_samples(submit))


class LiveRequest:
    """Holds what a request takes up until its last sample has ended."""

    __slots__ = ("_bytes", "_samples")

    def __init__(self, samples: Reservation, num_bytes: Reservation) -> None:
        self._samples = samples
        self._bytes = num_bytes

    @property
    def num_live(self) -> int:
        """Its samples that have not ended."""
        return self._samples.amount

    @property
    def num_bytes(self) -> int:
        """Memory of its prompt."""
        return self._bytes.amount

    def close(self) -> None:
        """Give back what is left of it."""
        self._samples.release()
        self._bytes.release()

    def end_sample(self) -> None:
        """Give back the place of one sample; with the last one also the memory of the prompt."""
        self._samples.release(1)
        if not self._samples.amount:
            self._bytes.release()


class LiveRequestLimit:
    """Counts what live requests take up."""

    def __init__(self, max_requests: int, max_prompt_bytes: int) -> None:
        self._samples = AdmissionLimit(max_requests)
        self._bytes = AdmissionLimit(max_prompt_bytes)

    @property
    def num_live(self) -> int:
        """Samples that have not ended."""
        return self._samples.taken

    @property
    def num_bytes(self) -> int:
        """Memory of the prompts of requests that have not ended."""
        return self._bytes.taken

    def check(self, submit: Submit) -> None:
        """Raise ``TryElsewhere`` if a request does not fit. One whose prompt alone is over the limit is taken while no
        other request is live: it would fit nowhere else either."""
        if not self._samples.can_take(num_samples(submit)):
            raise errors.TryElsewhere(f"The output processor already runs {self._samples.size} requests; retry.")
        if self._samples.taken and not self._bytes.can_take(prompt_bytes(submit)):
            megabytes = (self._bytes.size or 0) / (1 << 20)
            raise errors.TryElsewhere(f"The output processor's prompts already fill {megabytes:.3g} MiB; retry.")

    def take(self, submit: Submit, num_live: int) -> LiveRequest:
        """Take the place of a request of which so many samples run. :meth:`check` has decided."""
        return LiveRequest(self._samples.take_anyway(num_live), self._bytes.take_anyway(prompt_bytes(submit)))
