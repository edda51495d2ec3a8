"""Request heads and trailers without end, in one read or in many, fast or slow."""

import json
import time
from collections.abc import Iterator
from itertools import islice, repeat

from tests.attack.attack import MIB, Attack, Outcome
from tests.attack.target import MODEL, Target
from tests.attack.wire import Wire, head

LIMIT = 64 << 10
"""Bytes of a head, or of trailers."""
SLACK = 64 << 10
"""What the server may have read beyond the limit before it closes: the rest of one read."""
MAX_FIELDS = 100
SLOW_SECONDS = 15.0
"""By now a slow head must have been refused; the limit is 10 s."""
_PIECE = 16 << 10
_BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()


def fields(total: int) -> Iterator[bytes]:
    """Yield trailer fields of so many bytes, in pieces."""
    piece = b"a: b\r\n" * (_PIECE // 6)
    return repeat(piece, total // len(piece))


def value(total: int) -> Iterator[bytes]:
    """Yield one trailer field whose value has so many bytes, in pieces."""
    yield b"X-Long: "
    yield from repeat(b"a" * _PIECE, total // _PIECE)


def start_trailers(target: Target, key: str) -> bytes:
    """Return a whole request but for the trailers, and for the empty line that ends them."""
    return head(target, key=key, Transfer_Encoding="chunked") + b"%x\r\n%s\r\n0\r\n" % (len(_BODY), _BODY)


def _trailers(target: Target, key: str, pieces: Iterator[bytes]) -> Outcome:
    with Wire(target) as wire:  # a few trailers are legal, and reach the server
        wire.send(start_trailers(target, target.key) + b"X-Sum: 1\r\n\r\n")
        status, _ = wire.first_byte()
        assert status == 200, f"a request with one trailer was answered with {status}"
    with Wire(target) as wire:
        wire.send(start_trailers(target, key))
        passed = wire.send_until_closed(pieces, careful=4 * LIMIT)
        return _bounded(wire, passed)


def _bounded(wire: Wire, passed: int | None) -> Outcome:
    if passed is None:
        return Outcome("took everything", wrong=["the server took every byte"])
    answer = f"{wire.status or 'closed'} after {passed >> 10} KiB"
    return Outcome(answer, wrong=[] if passed <= LIMIT + SLACK else [f"the server took {passed >> 10} KiB"])


def trailer_fields(target: Target, total: int = 50 * MIB) -> Outcome:
    """Send trailer fields without a key."""
    return _trailers(target, "", fields(total))


def trailer_value(target: Target, total: int = 60 * MIB) -> Outcome:
    """Send one endless trailer field without a key."""
    return _trailers(target, "", value(total))


def trailer_fields_with_key(target: Target, total: int = 50 * MIB) -> Outcome:
    """Send trailer fields after a request that would be served."""
    return _trailers(target, target.key, fields(total))


def trailer_value_with_key(target: Target, total: int = 60 * MIB) -> Outcome:
    """Send one endless trailer field after a request that would be served."""
    return _trailers(target, target.key, value(total))


def _answered_431(target: Target, extra: dict[str, str]) -> int:
    with Wire(target) as wire:
        wire.send(head(target, key=target.key, Content_Length=str(len(_BODY)), Connection="close", **extra) + _BODY)
        return wire.first_byte()[0]


def big_head(target: Target) -> Outcome:
    """Send heads of more than 64 KiB that arrive in one read, as far as the sockets permit."""
    assert _answered_431(target, {"X-Long": "a" * 1024}) == 200
    sizes = (LIMIT + 1024, 2 * LIMIT, 3 * LIMIT)
    statuses = [_answered_431(target, {"X-Long": "a" * size}) for size in sizes]
    return _refused(statuses, [f"a head of {size >> 10} KiB" for size in sizes])


def many_fields(target: Target) -> Outcome:
    """Send heads of more than 100 short fields in one read."""
    assert _answered_431(target, {f"X-{n}": "a" for n in range(MAX_FIELDS - 20)}) == 200
    counts = (MAX_FIELDS + 1, 4 * MAX_FIELDS, 20 * MAX_FIELDS)
    statuses = [_answered_431(target, {f"X-{n}": "a" for n in range(count)}) for count in counts]
    return _refused(statuses, [f"a head of more than {count} fields" for count in counts])


def _refused(statuses: list[int], what: list[str]) -> Outcome:
    wrong = [f"{name}: {status}" for name, status in zip(what, statuses, strict=True) if status not in (400, 431)]
    return Outcome("/".join(map(str, dict.fromkeys(statuses))), wrong=wrong)


def _slow(target: Target, whole: bytes, fast: int, connections: int, limit: float) -> Outcome:
    """Send all but ``fast`` bytes at one byte a second, over many connections, until all are closed."""
    wires = [Wire(target) for _ in range(connections)]
    try:
        for wire in wires:
            wire.send(whole[:fast])
        began = time.monotonic()
        open_wires = wires
        for byte in islice(whole, fast, None):
            open_wires = [wire for wire in open_wires if wire.send(bytes([byte])) and not wire.is_closed(0)]
            if not open_wires or time.monotonic() - began > limit:
                break
            time.sleep(1.0)
        seconds = time.monotonic() - began
    finally:
        for wire in wires:
            wire.close()
    statuses = {wire.status for wire in wires}
    wrong = [f"{len(open_wires)} of {connections} still open after {seconds:.0f} s"] if open_wires else []
    return Outcome(f"{'/'.join(map(str, sorted(statuses)))} within {seconds:.0f} s", wrong=wrong)


def slow_heads(target: Target, connections: int = 200) -> Outcome:
    """Send heads at one byte a second."""
    whole = head(target, X_Long="a" * 600)
    return _slow(target, whole, 20, connections, SLOW_SECONDS)


def slow_trailers(target: Target, connections: int = 200) -> Outcome:
    """Send trailers at one byte a second."""
    whole = start_trailers(target, target.key)
    return _slow(target, whole + b"X-Long: " + b"a" * 600, len(whole), connections, 75.0)


def slow_bodies(target: Target, connections: int = 200) -> Outcome:
    """Send bodies at one byte a second."""
    start = head(target, key=target.key, Content_Length="10000")
    return _slow(target, start + b" " * 600, len(start), connections, 75.0)


ATTACKS = [
    Attack("trailer-fields", trailer_fields, max_growth=5),
    Attack("trailer-value", trailer_value, max_growth=5),
    Attack("trailer-fields-key", trailer_fields_with_key, max_growth=5),
    Attack("trailer-value-key", trailer_value_with_key, max_growth=5),
    Attack("head-bytes", big_head, max_growth=5),
    Attack("head-fields", many_fields, max_growth=5),
    Attack("slow-heads", slow_heads, max_growth=20),
    Attack("slow-trailers", slow_trailers, max_growth=20),
    Attack("slow-bodies", slow_bodies, max_growth=20),
]
