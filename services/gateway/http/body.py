"""Request bodies: how large, how encoded, how deep. Nothing is read that would be refused anyway."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tokenloom.request import errors

Receive = Callable[[], Awaitable[dict[str, Any]]]

BODY_SECONDS = 60.0
"""From the head of a request to the end of its body."""


class UnsupportedEncoding(errors.InvalidArgument):
    """A compressed body: its size after unpacking is not known before."""

    http_status = 415
    reason = "UNSUPPORTED_ENCODING"


class BodyTimeout(errors.InvalidArgument):
    """A body that does not come to its end: what came of it takes memory meanwhile."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


async def read_body(headers: dict[bytes, bytes], receive: Receive, limit: int, arrived: bytes | None = None) -> bytes:
    """The whole body, at most ``limit`` bytes. ``arrived``: it, where ``receive`` need not be asked.

    Raises :class:`errors.PayloadTooLarge`, before reading when Content-Length tells, and :class:`BodyTimeout`.
    """
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding != b"identity":
        raise UnsupportedEncoding("Content-Encoding is not supported: send the body as it is")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    if arrived is not None:
        if len(arrived) > limit:
            raise _too_large(limit)
        return arrived
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _receive(receive, limit)
    except TimeoutError:
        raise BodyTimeout(f"the body did not come within {BODY_SECONDS:g} s") from None


async def _receive(receive: Receive, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        more = message.get("more_body", False)
    return b"".join(chunks)


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``; NaN, infinities, numbers beyond float64, bad UTF-8, deep nesting are refused."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise errors.InvalidArgument("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise errors.InvalidArgument("the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise errors.InvalidArgument(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise errors.InvalidArgument("the body must be a JSON object")
    return value


def _too_large(limit: int) -> errors.PayloadTooLarge:
    return errors.PayloadTooLarge(f"the body is larger than {limit} bytes")
