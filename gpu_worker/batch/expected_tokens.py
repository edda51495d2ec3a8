"""Tokens that were drawn on the device and are not on the host yet: the batch holds places for them."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

UNKNOWN_TOKEN = -1
"""Stands in the batch for a token that only the device knows: a step takes it from there."""


class Arriving(Protocol):
    """Holds token ids [S] on their way to the host."""

    def has_arrived(self) -> bool: ...

    def wait(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Places:
    """Says where the tokens of a step belong; all are [S]."""

    rows: Ints
    positions: Ints
    """The index of each token in its row."""
    owners: Ints
    """How many requests had had the row before the one whose token it is; see ``InputBatch.place_tokens``."""


class TokenPlaces(Protocol):
    """Takes tokens for places that :class:`~.input_batch.InputBatch` gave out."""

    def place_tokens(self, places: Places, token_ids: Ints) -> None: ...


class ExpectedTokens:
    """Writes the tokens of earlier steps to the batch when they are there. Belongs to the thread of the batch.

    The tokens of the latest step may be missing, because the next one takes them on the device. There are at most as
    many steps here as an executor has in flight, and one more.
    """

    def __init__(self, batch: TokenPlaces) -> None:
        self._batch = batch
        self.steps: deque[tuple[Places, Arriving]] = deque()
        """Those whose tokens the batch does not have, the oldest first."""

    def add(self, places: Places, tokens: Arriving) -> None:
        """Add the latest step."""
        self.steps.append((places, tokens))

    def settle(self) -> None:
        """Take the tokens that have arrived, and wait for those of all steps but the latest."""
        # The latest step's tokens may stay on the device, where the next step takes them: waiting for them here is what
        # left the device idle between steps.
        while self.steps and (len(self.steps) > 1 or self.steps[0][1].has_arrived()):
            self._take_oldest()

    def _take_oldest(self) -> None:
        places, tokens = self.steps.popleft()
        self._batch.place_tokens(places, np.maximum(np.array(tokens.wait(), dtype=np.int64), 0))

    def settle_all(self) -> None:
        """Wait for the tokens of all steps."""
        while self.steps:
            self._take_oldest()

    def clear(self) -> None:
        """Forget all steps."""
        self.steps.clear()
