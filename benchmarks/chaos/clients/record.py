"""Keeps what became of each request. Times are in seconds; ``sent`` and ``ended`` count from the beginning of the
faults."""

from dataclasses import dataclass

from .answer import Answer


@dataclass(frozen=True)
class Reference:
    """What an undisturbed request returned, and how long it took."""

    answer: Answer
    latency: float
    longest_pause: float


@dataclass(frozen=True)
class Record:
    """One request under faults."""

    number: int
    case: str
    client: str
    resumes: bool
    """Whether the client survives the loss of its gateway."""
    moves: bool
    """Whether the client calls another gateway when its own is silent."""
    gateway: int
    streamed: bool
    sent: float
    ended: float
    seconds: float
    """Its time limit."""
    ttft: float | None
    """None: no stream, or no output."""
    pause: float
    """Longest time without an output; the whole latency of a unary request."""
    reference: Reference
    failure: str | None
    """Kind of the failure; None: the whole answer came."""
    is_typed: bool
    detail: str
    """The failure or the difference in words."""
    is_wrong: bool
    refused: int
    resumed: int

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def added(self) -> float:
        """How much later than undisturbed the answer was complete."""
        return self.latency - self.reference.latency

    @property
    def added_pause(self) -> float:
        return self.pause - (self.reference.longest_pause if self.streamed else self.reference.latency)
