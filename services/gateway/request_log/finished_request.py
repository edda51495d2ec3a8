"""Collects what a request generates, describes it when it has ended, and keeps the last ones for operators."""

from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct

from tokenloom.v1 import inference_pb2

MAX_RECENT: Final = 200
"""Requests that are kept: a page full of them, some hundred bytes each."""


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


class FinishedRequest(Struct, frozen=True, kw_only=True):
    """A client's request that was answered or refused, without anything that it or its answer said."""

    request_id: Annotated[
        str,
        Meta(description="The id that the response carried as x-request-id; over gRPC, the client's or the mesh's."),
    ]
    finished_at: Annotated[float, Meta(description="Unix seconds.")]
    route: Annotated[
        str, Meta(description="The pattern of the path, or the gRPC method; other: a path that is not served.")
    ]
    model: Annotated[str, Meta(description="The model that generated; empty if none did.")] = ""
    key: Annotated[
        str,
        Meta(
            description="First hex digits of the SHA-256 of the client's key; empty where none is needed or accepted."
        ),
    ] = ""
    prompt_tokens: Annotated[int, Meta(description="Tokens of all prompts of the request.")] = 0
    cached_tokens: Annotated[int, Meta(description="Those of them that were in the prefix cache.")] = 0
    output_tokens: Annotated[int, Meta(description="Tokens of all outputs.")] = 0
    ttft_seconds: Annotated[
        float | None, Meta(description="Seconds from the arrival to the first token; null: it had none.")
    ] = None
    seconds: Annotated[float, Meta(description="Seconds from the arrival to the end of the answer.")]
    status: Annotated[
        int,
        Meta(
            description="HTTP status, or the one that matches the gRPC status; 499: the client left without a response."
        ),
    ]
    reason: Annotated[
        str, Meta(description="Of the error that ended the request, e.g. INVALID_ARGUMENT; empty for an answer.")
    ] = ""
    generation_id: Annotated[
        str, Meta(description="Id of the request within the mesh, which its answer and the logs of all parts contain.")
    ] = ""


class LastRequests(Struct):
    """The last requests of a gateway."""

    requests: Annotated[list[FinishedRequest], Meta(description="The newest first.")]


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
