"""Defines what a client fills while it sends one request."""

from dataclasses import dataclass, field
from typing import Protocol

from .answer import Answer, Progress
from .mix import Case


@dataclass
class Exchange:
    """One request on its way: what it asks, and what came of it so far."""

    number: int
    case: Case
    gateway: int
    """Index of the gateway that the client calls first."""
    progress: Progress
    seconds: float
    """Time limit of the request."""
    answer: Answer = field(default_factory=Answer)
    refused: int = 0
    """Connections that were refused."""
    resumed: int = 0
    """How often the client called again for the rest of the answer."""


class ChaosClient(Protocol):
    """Sends requests in one way."""

    name: str
    transport: str
    """Clients of one transport receive the same answers."""
    resumes: bool
    """Whether the client survives the loss of its gateway."""
    moves: bool
    """Whether the client calls another gateway when its own is silent."""

    is_special: bool
    """Whether the client makes only those calls that name it."""

    async def send(self, exchange: Exchange) -> None:
        """Fill the exchange's answer. Raises ``RequestFailed``."""

    async def close(self) -> None:
        """Close what the client keeps open."""
