"""Bodies and answers of ``/v1/files`` and ``/v1/batches``, for reading them and for the OpenAPI document."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class CreateBatchRequest(msgspec.Struct):
    """Asks for answers to the requests of a file."""

    input_file_id: Annotated[str, Meta(description="File of requests, uploaded with the purpose batch.")]
    endpoint: Annotated[str, Meta(description="Where the requests are sent, such as /v1/chat/completions.")]
    completion_window: Annotated[
        str, Meta(description="Time after which requests without an answer are given up: 1h to 168h.")
    ] = "24h"
    metadata: Annotated[
        dict[str, str] | None, Meta(description="Up to 16 pairs of names and values, which the batch repeats.")
    ] = None


class UploadFileRequest(msgspec.Struct):
    """Uploads a file."""

    file: Annotated[str, Meta(description="The file: a request of a batch on each line, as JSON.")]
    purpose: Annotated[
        Literal["batch", "vision", "user_data"],
        Meta(description="What the file is for: batch, or images that input_image of /v1/responses names."),
    ]


class File(msgspec.Struct):
    """Describes a stored file."""

    id: Annotated[str, Meta(description="Names the file.")]
    object: Annotated[Literal["file"], Meta(description="Kind of the object.")]
    bytes: Annotated[int, Meta(description="Size.")]
    created_at: Annotated[int, Meta(description="Unix time at which it was stored.")]
    filename: Annotated[str, Meta(description="Name that the client gave it.")]
    purpose: Annotated[str, Meta(description="As it was uploaded; batch_output for results.")]
    status: Annotated[Literal["processed"], Meta(description="The file can be used.")]
    expires_at: Annotated[None, Meta(description="Files are kept until they are deleted.")]
    status_details: Annotated[None, Meta(description="Always null.")]


class FileList(msgspec.Struct):
    """Lists files, the newest first."""

    object: Annotated[Literal["list"], Meta(description="Kind of the object.")]
    data: Annotated[list[File], Meta(description="The files.")]
    first_id: Annotated[str | None, Meta(description="Id of the first file.")]
    last_id: Annotated[str | None, Meta(description="Id of the last file, to ask for those after it.")]
    has_more: Annotated[bool, Meta(description="Whether there are files after the last one.")]


class DeletedFile(msgspec.Struct):
    """Confirms that a file was deleted."""

    id: Annotated[str, Meta(description="Id of the file.")]
    object: Annotated[Literal["file"], Meta(description="Kind of the object.")]
    deleted: Annotated[bool, Meta(description="Whether it was deleted.")]


class RequestCounts(msgspec.Struct):
    """Counts the requests of a batch."""

    total: Annotated[int, Meta(description="Requests of the file; 0 before it was validated.")]
    completed: Annotated[int, Meta(description="Requests that were answered.")]
    failed: Annotated[int, Meta(description="Requests that ended in an error.")]


_Time = Annotated[int | None, Meta(description="Unix time; null if it has not happened.")]


class BatchObject(msgspec.Struct):
    """Describes a batch."""

    id: Annotated[str, Meta(description="Names the batch.")]
    object: Annotated[Literal["batch"], Meta(description="Kind of the object.")]
    endpoint: Annotated[str, Meta(description="Where its requests are sent.")]
    errors: Annotated[dict[str, Any] | None, Meta(description="Why the batch has failed.")]
    input_file_id: Annotated[str, Meta(description="File of its requests.")]
    completion_window: Annotated[str, Meta(description="Time that it has.")]
    status: Annotated[
        str,
        Meta(
            description="validating, in_progress, finalizing, completed, failed, expired, cancelling or cancelled.",
        ),
    ]
    output_file_id: Annotated[str | None, Meta(description="File of the answers, once the batch has ended.")]
    error_file_id: Annotated[str | None, Meta(description="File of the errors, once the batch has ended.")]
    created_at: Annotated[int, Meta(description="Unix time at which it was made.")]
    in_progress_at: _Time
    expires_at: Annotated[int, Meta(description="Unix time at which requests without an answer are given up.")]
    finalizing_at: _Time
    completed_at: _Time
    failed_at: _Time
    expired_at: _Time
    cancelling_at: _Time
    cancelled_at: _Time
    request_counts: Annotated[RequestCounts, Meta(description="How many requests it has, and how many have ended.")]
    metadata: Annotated[dict[str, str] | None, Meta(description="As the client gave it.")]


class BatchList(msgspec.Struct):
    """Lists batches, the newest first."""

    object: Annotated[Literal["list"], Meta(description="Kind of the object.")]
    data: Annotated[list[BatchObject], Meta(description="The batches.")]
    first_id: Annotated[str | None, Meta(description="Id of the first batch.")]
    last_id: Annotated[str | None, Meta(description="Id of the last batch, to ask for those after it.")]
    has_more: Annotated[bool, Meta(description="Whether there are batches after the last one.")]
