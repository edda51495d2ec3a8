"""Reads the columns of a frame: the new text and tokens of each output in it."""

from collections.abc import Iterator

from tokenloom.request import errors
from tokenloom.v1.output_processor_pb2 import ProcessFrame


class FrameRows:
    """Holds a frame's columns, which fit together.

    Attributes:
        token_ids: The tokens of all rows, one after the other.
    """

    def __init__(self, frame: ProcessFrame) -> None:
        """Raises :class:`errors.FailedPrecondition` when the columns do not fit together."""
        self.token_ids = list(frame.token_ids)
        self._slots, self._texts, self._token_indices = frame.slot, frame.text, frame.token_index
        self._samples = frame.sample_index or [0] * len(self._slots)
        self._counts = frame.num_tokens or [1] * len(self._slots)
        columns = (self._slots, self._samples, self._texts, self._token_indices, self._counts)
        if len(set(map(len, columns))) != 1 or sum(self._counts) != len(self.token_ids):
            raise errors.FailedPrecondition("a frame's columns differ in length")

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __iter__(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Return slot, sample, text, position of the first token in the whole output, and number of tokens."""
        return zip(self._slots, self._samples, self._texts, self._token_indices, self._counts, strict=True)
