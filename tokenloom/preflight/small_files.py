"""Reads the small files of a checkpoint; holds the error that every check raises."""

import json
from pathlib import Path
from typing import Any

_POINTER = b"version https://git-lfs"
_AGAIN = "download the model again"


def check_content(file: Path) -> bytes:
    """Return the first bytes of a file. Raises `CannotServe` unless it can be read and has content of its own: it is no
    pointer of git-lfs, no web page, and not empty."""
    if file.is_symlink() and not file.exists():
        raise CannotServe(f"{file} is a link to {file.readlink()}, which does not exist: {_AGAIN}")
    try:
        with file.open("rb") as stream:
            head = stream.read(256)
    except OSError as error:
        raise CannotServe(f"{file} cannot be read ({error.strerror}): give this user the right to read it") from None
    if not head:
        raise CannotServe(f"{file} is empty: {_AGAIN}")
    if head.startswith(_POINTER):
        raise CannotServe(
            f"{file} is a git-lfs pointer instead of the file itself: run `git lfs pull` in {file.parent}"
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CannotServe(f"{file} holds a web page: download the file itself, for example with `hf download`")
    return head


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `CannotServe`."""
    check_content(file)
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8; brackets nested beyond the stack
        raise CannotServe(f"{file} is not JSON ({error}): {_AGAIN}") from None
    if not isinstance(values, dict):
        raise CannotServe(f"{file} must hold a JSON object, not {type(values).__name__}: {_AGAIN}")
    return values


class CannotServe(Exception):
    """Ends the start. The message is one sentence that names the file or option, and the way out."""
