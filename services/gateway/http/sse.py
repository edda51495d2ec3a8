"""Server-sent events in OpenAI's form, put together as bytes: one event a token is the gateway's hottest path."""

from collections.abc import Sequence

import msgspec

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, types_pb2

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode
"""UTF-8 JSON; strings come out escaped and on one line."""


class TextEvent:
    """An event of which only the text differs from one to the next: what most tokens come as."""

    __slots__ = ("_head", "_tail")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head = head
        self._tail = tail

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._head, encode_json(text), self._tail)


class EventWriter:
    """Events of one response; what they share is encoded once."""

    def __init__(self, response_id: str, object_name: str, created: int, model: str, *, usage_is_null: bool) -> None:
        """``usage_is_null``: every event says ``"usage": null``, as OpenAI does when the last one will carry it."""
        head = encode_json({"id": response_id, "object": object_name, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._null_usage = b',"usage":null' if usage_is_null else b""

    def event(self, choice: bytes, extra: bytes = b"", usage: inference_pb2.Usage | None = None) -> bytes:
        """One event with one choice, or none, and further members of the object with their leading comma."""
        tail = self._null_usage if usage is None else b',"usage":' + encode_json(usage_object(usage))
        return b"%b%b]%b%b}\n\n" % (self._head, choice, tail, extra)

    def text_event(self, index: int, member: bytes, close: bytes = b"") -> TextEvent:
        """Events with text and no more: ``member`` is what stands before the text in the choice, ``close`` after it."""
        head, tail = self.event(choice(index, b"%b\0%b" % (member, close))).split(b"\0")
        return TextEvent(head, tail)


def choice(index: int, content: bytes, finish: bytes = b"null", extra: bytes = b"", logprobs: bytes = b"null") -> bytes:
    """A choice: ``content`` is its ``"delta"`` or ``"text"`` member, ``finish`` its JSON finish reason."""
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (index, content, logprobs, finish, extra)


def token_ids_member(token_ids: Sequence[int]) -> bytes:
    return b',"token_ids":' + encode_json(token_ids)


def members(values: dict[str, object]) -> bytes:
    """Further members of a JSON object, with their leading comma."""
    return b"," + encode_json(values)[1:-1] if values else b""


def error_event(error: errors.TokenloomError) -> bytes:
    """How a stream that has begun tells that it failed."""
    return b"data: " + encode_json(errors.openai_body(error)) + b"\n\n"


def usage_object(usage: inference_pb2.Usage) -> dict[str, object]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timeline_object(timeline: types_pb2.Timeline, total_ns: int) -> dict[str, object]:
    """Milliseconds in each part, and which engines did the work."""
    parts = ("tokenize", "placement", "queued", "prefill", "kv_transfer", "decode", "detokenize")
    times: dict[str, object] = {f"{part}_ms": round(getattr(timeline, f"{part}_ns") / 1e6, 3) for part in parts}
    times["total_ms"] = round(total_ns / 1e6, 3)
    return times | {"prefill_engine": timeline.prefill_engine, "decode_engine": timeline.decode_engine}
