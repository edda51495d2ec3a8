"""Describes a file that a client has uploaded, or that a batch has written."""

from typing import Any
from uuid import uuid4

from msgspec import Struct

MAX_NAME = 255
"""Limits the characters of a file's name; it is shown and never used as a path."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """Describes a file. It is kept as JSON next to the data.

    Attributes:
        id: Names the file for clients, and on disk.
        tenant: Name of the tenant that it belongs to.
        size: Bytes.
        created: When it was stored, in seconds since 1970.
        name: The client's name for it.
        purpose: ``batch``, or ``batch_output`` for results.
    """

    id: str
    tenant: str
    size: int
    created: int
    name: str
    purpose: str

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }


def new_file_id() -> str:
    """Return an id that no other file has."""
    return f"file-{uuid4().hex}"
