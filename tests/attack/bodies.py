"""Bodies of legal size that are expensive to decode, to check and to keep."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.attack.attack import MIB, Attack, Outcome
from tests.attack.target import MODEL, Target
from tests.attack.wire import Wire, head, post, request

MAX_SECONDS = 0.1
MAX_RSS_MIB = 256
AT_ONCE = 16
LARGEST = 8 << 20
"""The largest body that the gateway accepts by default, in bytes."""
_REFUSED = {400, 413, 422, 429, 503}


def logit_bias(entries: int = 500_000) -> bytes:
    """Return a completion with so many biases."""
    return _completion(b'"logit_bias":{%s}' % b",".join(b'"%d":1' % token for token in range(entries)))


def stops(entries: int = 1_000_000) -> bytes:
    """Return a completion with so many stop strings."""
    return _completion(b'"stop":[%s]' % b",".join([b'"a"'] * entries))


def empty_objects(field: str, size: int = LARGEST - 1024) -> bytes:
    """Return a completion whose field is a list of empty objects, of so many bytes."""
    return _completion(b'"%s":[%s{}]' % (field.encode(), b"{}," * (size // 3)))


def _completion(rest: bytes) -> bytes:
    return b'{"model":"%s","prompt":"Once","max_tokens":4,%s}' % (MODEL.encode(), rest)


def _served(target: Target) -> None:
    status, answer = request(target, target.key, model=MODEL, prompt="Once", max_tokens=4, logit_bias={"7": 1})
    assert status == 200, answer


def send_at_once(
    target: Target, body: Callable[[], bytes], path: str = "/v1/completions", num: int = AT_ONCE
) -> Outcome:
    """Send a body over so many connections at the same time; each must be refused."""
    _served(target)
    data = post(target, body(), path, target.key)

    def ask(_: int) -> tuple[int, float]:
        with Wire(target) as wire:
            if wire.send(data):
                began = time.monotonic()
                status, at = wire.first_byte()
                return status, at - began
            return wire.first_byte()[0], 0.0  # the server closed before the end, and its answer may have come before

    with ThreadPoolExecutor(num) as pool:
        answers = list(pool.map(ask, range(num)))
    statuses = sorted({status for status, _ in answers})
    slowest = max(seconds for _, seconds in answers)
    summary = "/".join(map(str, statuses))
    wrong = [] if set(statuses) <= _REFUSED else [f"answered with {summary}"]
    late = [f"an answer took {slowest * 1e3:.0f} ms"] if slowest > MAX_SECONDS else []
    return Outcome(f"{summary} in {slowest * 1e3:.0f} ms", wrong, late)


def held_streams(target: Target, streams: int = 8, size: int = LARGEST - 1024) -> Outcome:
    """Hold streams open whose bodies were full of junk that no part reads; the gateway must drop what it decoded.

    Half of the bodies hold one long string, the other half so many objects that the gateway may refuse them.
    """
    forms = (b'"%s"' % (b"x" * size), b"[%s{}]" % (b"{}," * (size // 3)))
    wires = [Wire(target) for _ in range(streams)]
    statuses = []
    try:
        for number, wire in enumerate(wires):
            body = _completion(b'"junk":%s,"stream":true,"ignore_eos":true' % forms[number % 2])
            body = body.replace(b'"max_tokens":4', b'"max_tokens":1500')
            wire.send(head(target, key=target.key, Content_Length=str(len(body))) + body)
            statuses.append(wire.first_byte()[0])
        time.sleep(1.0)
        held = target.gateway.memory_info().rss / MIB
    finally:
        for wire in wires:
            wire.close()
    summary = f"{statuses.count(200)} of {streams} held in {held:.0f} MiB, others {set(statuses) - {200} or 'none'}"
    assert 200 in statuses, f"no stream was served, so none was held: {statuses}"
    return Outcome(summary, wrong=[] if set(statuses) <= _REFUSED | {200} else [f"answered with {statuses}"])


ATTACKS = [
    Attack("held-streams", held_streams, max_rss=MAX_RSS_MIB),
    Attack("logit-bias", partial(send_at_once, body=logit_bias), max_rss=MAX_RSS_MIB),
    Attack("stops", partial(send_at_once, body=stops), max_rss=MAX_RSS_MIB),
    *(
        Attack(
            f"empty-{field}", partial(send_at_once, body=partial(empty_objects, field), path=path), max_rss=MAX_RSS_MIB
        )
        for field, path in [
            ("prompt", "/v1/completions"),
            ("stop", "/v1/completions"),
            ("messages", "/v1/chat/completions"),
            ("tools", "/v1/chat/completions"),
        ]
    ),
]
