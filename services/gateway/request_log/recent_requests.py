"""Keeps the last requests for the operators."""

from collections import deque
from collections.abc import Iterator
from typing import Final

from .finished_request import FinishedRequest

MAX_RECENT: Final = 200
"""Requests that are kept: a page full of them, some hundred bytes each."""


class RecentRequests:
    """Holds the last requests; a new one replaces the oldest."""

    def __init__(self, size: int = MAX_RECENT) -> None:
        self._requests: deque[FinishedRequest] = deque(maxlen=size)

    def add(self, finished: FinishedRequest) -> None:
        """Keep a request that has ended."""
        self._requests.append(finished)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[FinishedRequest]:
        """Return the requests, the newest first."""
        return reversed(self._requests)
