"""Collects what a request has generated, from its arrival to its end."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from tokenloom.v1 import inference_pb2


class Generated(Protocol):
    """Describes what is read of a generation at its end."""

    @property
    def request_id(self) -> str:
        """Its id within the mesh."""

    @property
    def model(self) -> str:
        """The name of the model or adapter."""

    @property
    def usage(self) -> inference_pb2.Usage:
        """Its tokens."""

    @property
    def ttft_seconds(self) -> float | None:
        """From its arrival to its first token; None: it had none."""


@dataclass(slots=True)
class RequestRecord:
    """Adds up the generations of one HTTP request or gRPC call: a session has several.

    Attributes:
        request_id: The client's id of a gRPC call; empty: it has none.
        model, generation_id: Of the last generation.
        prompt_tokens, cached_tokens, output_tokens: Of all of them.
        ttft_seconds: Of the first one that had a token.
    """

    request_id: str = ""
    model: str = ""
    generation_id: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_seconds: float | None = None

    def add(self, generation: Generated) -> None:
        """Add a generation that has ended."""
        usage = generation.usage
        self.model, self.generation_id = generation.model, generation.request_id
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.completion_tokens
        if self.ttft_seconds is None:
            self.ttft_seconds = generation.ttft_seconds


CURRENT_RECORD: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)
"""The record of the request that a task works on. Each HTTP request and each gRPC call has a task of its own."""


def record_generation(generation: Generated) -> None:
    """Add a generation that has ended to the record of the current request, if it has one."""
    if (record := CURRENT_RECORD.get()) is not None:
        record.add(generation)
