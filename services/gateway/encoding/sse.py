"""Server-sent events in OpenAI's form, joined as bytes: one event for each token is the gateway's hottest path. The
long arrays of an answer are joined in blocks."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tokenloom.v1 import inference_pb2, types_pb2

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

encode_json = msgspec.json.Encoder().encode
"""Returns UTF-8 JSON; strings are escaped and on one line."""


class EventWriter:
    """Makes the events of one response; what they share is encoded once."""

    def __init__(self, response_id: str, object_name: str, created: int, model: str, *, usage_is_null: bool) -> None:
        """``usage_is_null``: every event has ``"usage": null``, as in OpenAI's API when the last one has the usage."""
        head = encode_json({"id": response_id, "object": object_name, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._null_usage = b',"usage":null' if usage_is_null else b""

    def event(self, choice: bytes, extra: bytes = b"", usage: inference_pb2.Usage | None = None) -> bytes:
        """Return an event with one choice, or none. ``extra``: further members of the object, with a leading comma."""
        tail = self._null_usage if usage is None else b',"usage":' + encode_json(usage_object(usage))
        return b"%b%b]%b%b}\n\n" % (self._head, choice, tail, extra)

    def text_ends(self, index: int, member: bytes, close: bytes = b"") -> tuple[bytes, bytes]:
        """Return what stands before and after the JSON text in events that hold only text, as most events do.

        ``member``: what stands before the text in the choice; ``close``: what stands after it there.
        """
        # A NUL never occurs in JSON text, so it marks the place of the text in an event that is otherwise encoded once.
        head, tail = choice(index, b"%b\0%b" % (member, close)).split(b"\0")
        return self._head + head, b"%b]%b}\n\n" % (tail, self._null_usage)


def choice(index: int, content: bytes, finish: bytes = b"null", extra: bytes = b"", logprobs: bytes = b"null") -> bytes:
    """Return a choice. ``content``: its ``"delta"`` or ``"text"`` member; ``finish``: its JSON finish reason."""
    return b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}' % (index, content, logprobs, finish, extra)


def token_ids_member(token_ids: Sequence[int]) -> bytes:
    return b',"token_ids":' + encode_json(token_ids)


def members(values: dict[str, object]) -> bytes:
    """Return the members of a JSON object, with a leading comma."""
    return b"," + encode_json(values)[1:-1] if values else b""


def usage_object(usage: inference_pb2.Usage) -> dict[str, object]:
    """Return OpenAI's usage object."""
    details: dict[str, object] = {}
    if usage.HasField("reasoning_tokens"):
        details["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    cached: dict[str, object] = {"cached_tokens": usage.cached_tokens}
    if usage.HasField("cache_miss"):
        cached |= cache_miss(usage)
    if usage.cache_write_tokens:
        cached["cache_write_tokens"] = usage.cache_write_tokens
    if usage.cpu_ns:
        details["cpu_ms"] = _milliseconds(usage.cpu_ns)
    if usage.audio_tokens:
        cached["audio_tokens"] = usage.audio_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cached,
        **details,
    }


def cause_name(cause: inference_pb2.MissCause) -> str:
    """Return the name of a cause for clients and dashboards."""
    return inference_pb2.MissCause.Name(cause).removeprefix("MISS_CAUSE_").lower()


def cache_miss(usage: inference_pb2.Usage) -> dict[str, object]:
    """Return why a turn did not find in the cache what an earlier one had left there, as a member; empty if it did."""
    if not usage.HasField("cache_miss"):
        return {}
    miss = usage.cache_miss
    members = {"cause": cause_name(miss.cause), "token": miss.token, "missed_tokens": miss.missed_tokens}
    return {"cache_miss": members}


_BILLED_PARTS = ("gateway", "tokenizer", "output_processor", "engine")


def _milliseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


def timeline_object(timeline: types_pb2.Timeline, total_ns: int) -> dict[str, object]:
    """Return the milliseconds spent in each part, the engines that did the work, and the drafts that they verified."""
    parts = ("tokenize", "placement", "queued", "prefill", "kv_transfer", "decode", "detokenize")
    times: dict[str, object] = {f"{part}_ms": _milliseconds(getattr(timeline, f"{part}_ns")) for part in parts}
    times["total_ms"] = _milliseconds(total_ns)
    times |= {"prefill_engine": timeline.prefill_engine, "decode_engine": timeline.decode_engine}
    if timeline.moves:
        times["moves"] = timeline.moves
    if timeline.HasField("cpu"):
        times["cpu_ms"] = {part: _milliseconds(getattr(timeline.cpu, f"{part}_ns")) for part in _BILLED_PARTS}
    if timeline.past_tokens:
        times["session_kv"] = "store" if timeline.kv_from_store else "elsewhere" if timeline.kv_elsewhere else "home"
    if timeline.HasField("drafts"):
        counts = timeline.drafts
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        times["drafts"] = {name: getattr(counts, name) for name in names}
    return times


BLOCK_BYTES = 64 << 10


class JsonBlocks:
    """Collects the elements of one JSON array, as bytes."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._elements: list[bytes] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._elements or self._blocks)

    def add(self, element: bytes) -> None:
        self._elements.append(element)
        self._size += len(element)
        if self._size > BLOCK_BYTES:
            self._join()

    def take(self) -> Iterator[bytes]:
        """Return the elements with commas between them, in blocks, and forget them."""
        self._join()
        blocks, self._blocks = self._blocks, []
        return joined(blocks)

    def _join(self) -> None:
        if self._elements:
            self._blocks.append(b",".join(self._elements))
            self._elements, self._size = [], 0


def joined(elements: Iterable[bytes]) -> Iterator[bytes]:
    """Yield elements, with a comma before each but the first."""
    is_first = True
    for element in elements:
        yield element if is_first else b"," + element
        is_first = False
