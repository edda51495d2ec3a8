"""Remembers what an engine has to compute for the picks in its queue. No I/O."""

from collections import deque

from tokenloom.v1.coordinator_pb2 import EngineReport


class ArrivedPicks:
    """Keeps the uncached prompt tokens of the picks that wait at an engine.

    An engine reports the prompt tokens of its queue, but knows only when a request begins which of them are cached. The
    coordinator estimated that when it picked. Requests begin in the order of their arrival, so of the picks that have
    arrived, those wait that came last.
    """

    def __init__(self) -> None:
        self._tokens: deque[int] = deque()  # as many as the engine has waiting requests, after each report
        self._total = 0

    def add(self, uncached_tokens: int) -> None:
        """Append a pick that has arrived."""
        self._tokens.append(uncached_tokens)
        self._total += uncached_tokens

    def trim(self, num_waiting: int) -> None:
        """Drop the picks that wait no more."""
        # The queue is taken in order, so the oldest have begun. A rate of the whole queue would not do instead: most of
        # its tokens may turn out to be cached.
        while len(self._tokens) > num_waiting:
            self._total -= self._tokens.popleft()

    def uncached_tokens(self, report: EngineReport) -> float:
        """Return the prompt tokens to compute for all requests that wait. Those of which nothing is known, because
        other coordinators placed them, count in full."""
        num_unknown = report.waiting - len(self._tokens)
        return self._total + (report.waiting_tokens * num_unknown / report.waiting if num_unknown > 0 else 0)
