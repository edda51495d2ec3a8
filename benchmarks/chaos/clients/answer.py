"""Defines what a client has received of an answer, in one form for every API."""

from dataclasses import dataclass, field


@dataclass
class Sample:
    """One of the ``n`` outputs of a request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[float] = field(default_factory=list)
    """Log probability of each token, if the request asked for them."""
    tool_calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each call. Their ids are drawn at random and not compared."""


@dataclass
class Answer:
    """A whole answer, or the part of it that arrived."""

    samples: dict[int, Sample] = field(default_factory=dict)
    completion_tokens: int | None = None
    """As the usage reports them."""

    def sample(self, index: int) -> Sample:
        return self.samples.setdefault(index, Sample())


@dataclass
class Progress:
    """Records when outputs arrived. All times are seconds of the event loop's clock."""

    sent: float
    first: float | None = None
    last: float = 0.0
    longest_pause: float = 0.0
    """Longest time without an output, the wait for the first one included."""

    def output(self, now: float) -> None:
        """Record an output that arrived now."""
        if self.first is None:
            self.first = now
        self.longest_pause = max(self.longest_pause, now - (self.last or self.sent))
        self.last = now
