"""Measures how fast an engine's queue moves, from the statistics of its steps. No I/O."""

from typing import Final

from tokenloom.engine_core.data.messages import SchedulerStats

_HALF_LIFE_SECONDS: Final = 5.0
_HALF_LIFE_REQUESTS: Final = 32.0
_LEAST_SECONDS: Final = 0.2
_FULL_KV_USAGE: Final = 0.9


class DecayedRate:
    """Averages events per second over the last intervals that were measured.

    Old intervals lose half of their weight after 5 s of measured time in which 32 requests began, or more slowly if
    fewer began: an engine whose requests run for a minute is measured over several minutes, and a batch whose requests
    all end together does not make the rate jump. Time that is not measured changes nothing.
    """

    def __init__(self) -> None:
        self._seconds = self._events = 0.0

    @property
    def per_second(self) -> float:
        """Events per second; 0 before the first event, or if too little was measured."""
        return self._events / self._seconds if self._seconds >= _LEAST_SECONDS else 0.0

    def add(self, seconds: float, events: int, num_requests: int) -> None:
        """Add an interval. ``num_requests``: requests that began in it, which may differ from the events."""
        if num_requests:
            decay = 0.5 ** min(seconds / _HALF_LIFE_SECONDS, num_requests / _HALF_LIFE_REQUESTS)
            self._seconds *= decay
            self._events *= decay
        self._seconds += seconds
        self._events += events


class QueueRates:
    """Measures, while requests wait, how fast they leave the queue, and what they wait for.

    Requests wait for a seat when the batch or the KV cache is full; then requests per second are measured. Otherwise
    they wait because the prompts before them take the whole budget of a step; then prompt tokens per second are
    measured. Time in which no request waits shows what clients send, not what the engine can do, and is not measured.

    Attributes:
        seats: Requests that may run at the same time.
    """

    def __init__(self, max_num_seqs: int) -> None:
        """``max_num_seqs``: requests in the largest batch."""
        self.seats = max_num_seqs
        self._max_num_seqs = max_num_seqs
        self._last = SchedulerStats()
        self._at = 0.0
        self._prefill = DecayedRate()
        self._starts = DecayedRate()

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens that are computed per second while only compute limits the queue; 0: not known."""
        return self._prefill.per_second

    @property
    def starts_per_second(self) -> float:
        """Requests that begin per second while they wait for seats; 0: not known."""
        return self._starts.per_second

    def observe(self, stats: SchedulerStats, now: float) -> None:
        """Take the statistics of a step. ``now``: seconds of a monotonic clock."""
        last, self._last = self._last, stats
        seconds, self._at = now - self._at, now
        if not stats.num_waiting:
            self.seats = self._max_num_seqs
            return
        is_kv_full = stats.kv_usage >= _FULL_KV_USAGE
        # With a full KV cache the batch cannot grow, so what runs now is what can run, whatever --max-num-seqs says.
        self.seats = max(stats.num_running, 1) if is_kv_full else self._max_num_seqs
        # The interval began with an empty queue, so it measures in part how clients send.
        if not last.num_waiting:
            return
        num_begun = stats.num_prefilled_requests - last.num_prefilled_requests
        if stats.num_running >= self.seats:
            self._starts.add(seconds, num_begun, num_begun)
        else:
            self._prefill.add(seconds, stats.num_prefilled_tokens - last.num_prefilled_tokens, num_begun)

    def skip(self) -> None:
        """Leave out the time since the last step, because the engine was paused."""
        self._last = SchedulerStats()
