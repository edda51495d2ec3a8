"""Reads a line of an OpenAI batch file, and makes the line that answers it."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..server import ServerReply
from .jsonl import parse

_PATH = re.compile(r"[!-~]+")
"""What a line of HTTP can carry."""


@dataclass(frozen=True)
class BatchRequest:
    """Holds a request from the file."""

    custom_id: str
    url: str
    """The path, such as ``/v1/chat/completions``."""
    body: Mapping[str, Any]


class BadRequest(ValueError):
    """The line is not a valid request; the message says why."""

    def __init__(self, custom_id: str, message: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_request(number: int, line: str) -> BatchRequest:
    """Read a line. Raises `BadRequest`, with the id ``line-N`` for a line without one."""
    unnamed = f"line-{number}"
    try:
        value = parse(line)
    except ValueError as error:
        raise BadRequest(unnamed, f"line {number} {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(unnamed, f"line {number} must be an object")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadRequest(unnamed, f"line {number}: custom_id must be a string")
    if value.get("method", "POST") != "POST":
        raise BadRequest(custom_id, f"line {number}: method must be POST")
    if not isinstance(url, str) or not url.startswith("/v1/") or not _PATH.fullmatch(url):
        raise BadRequest(custom_id, f"line {number}: url must be a path such as /v1/chat/completions")
    if not isinstance(body, dict):
        raise BadRequest(custom_id, f"line {number}: body must be an object")
    if body.get("stream"):
        raise BadRequest(custom_id, f"line {number}: stream must not be set in a batch")
    return BatchRequest(custom_id, url, body)


def reply_line(request: BatchRequest, reply: ServerReply) -> dict[str, Any]:
    """Make the line for a request that the server answered, with success or an error."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    return _line(request.custom_id, response, None)


def error_line(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """Make the line for a request that got no answer."""
    return _line(custom_id, None, {"code": code, "message": message})


def failed(line: Mapping[str, Any]) -> bool:
    """Return whether the line reports a failure."""
    return line.get("error") is not None or line["response"]["status_code"] != 200


def _line(custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
