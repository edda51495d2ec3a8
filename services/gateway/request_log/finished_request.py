"""Describes a request that has ended, by what an operator may see, and keeps the last ones."""

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta, Struct

MAX_RECENT: Final = 200
"""Requests that are kept: a page full of them, some hundred bytes each."""


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
