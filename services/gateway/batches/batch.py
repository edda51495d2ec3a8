"""Describes a batch: OpenAI's object, and how it changes."""

from typing import Any, Final, Literal, TypeAlias
from uuid import uuid4

from msgspec import Struct, field

Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
STATUSES: Final[tuple[Status, ...]] = (
    *("validating", "in_progress", "finalizing", "completed"),
    *("failed", "expired", "cancelling", "cancelled"),
)
ENDED: Final[frozenset[Status]] = frozenset({"completed", "failed", "expired", "cancelled"})
ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
)
"""What the lines of a batch may ask for."""


class BatchProblem(Struct, frozen=True):
    """Says why a batch has failed."""

    code: str
    message: str
    line: int | None = None


class StoredBatch(Struct, kw_only=True):
    """Describes a batch. It is kept as JSON, which is replaced with each change of its status.

    Attributes:
        id: Names the batch.
        tenant: Name of the tenant that it belongs to.
        endpoint: Where its lines are sent; one of :data:`ENDPOINTS`.
        input_file_id: The file with its requests.
        completion_window: As the client wrote it.
        metadata: The client's own.
        output_file_id, error_file_id: The files of results; they exist when the batch has ended, if they hold anything.
        status: The last value of ``times``.
        times: When each status began, in seconds since 1970.
        expires_at: When what has no answer is given up.
        total, completed, failed: Lines; those that have an answer, and those that have an error.
        problems: Why it has failed.
        outcome: The status that it gets when its results are files; None: lines may still get results. When it is
            written, ``completed`` and ``failed`` are final.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    output_file_id: str
    error_file_id: str
    expires_at: float
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: list[BatchProblem] = field(default_factory=list)
    outcome: Status | None = None

    @property
    def is_ended(self) -> bool:
        """Whether nothing of it runs, or will run."""
        return self.status in ENDED

    def begin(self, status: Status, now: float) -> None:
        """Change the status."""
        self.status = status
        self.times[status] = int(now)

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": list(map(_problem, self.problems))} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.is_ended and self.completed else None,
            "error_file_id": self.error_file_id if self.is_ended and self.failed else None,
            "created_at": self.times["validating"],
            "in_progress_at": self.times.get("in_progress"),
            "expires_at": int(self.expires_at),
            "finalizing_at": self.times.get("finalizing"),
            "completed_at": self.times.get("completed"),
            "failed_at": self.times.get("failed"),
            "expired_at": self.times.get("expired"),
            "cancelling_at": self.times.get("cancelling"),
            "cancelled_at": self.times.get("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_batch_id() -> str:
    """Return an id that no other batch has."""
    return f"batch_{uuid4().hex}"


def _problem(problem: BatchProblem) -> dict[str, Any]:
    return {"code": problem.code, "message": problem.message, "line": problem.line, "param": None}
