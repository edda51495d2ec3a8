"""Bodies that make a validator work for longer than their length justifies."""

import json
import time
from typing import Any

from tests.attack.attack import Attack, Outcome
from tests.attack.target import MODEL, Target
from tests.attack.wire import Wire, post, request

MAX_SECONDS = 0.1
MAX_CPU_SECONDS = 2.0
"""Processor time of the gateway that no answer may cost; a quadratic one costs 5 s, and a linear one a few ms."""


def quadratic_string(target: Target, sizes: tuple[int, ...] = (32 << 10, 64 << 10)) -> Outcome:
    """Send schemas that consist of one string without an end, full of escaped quotes."""
    status, answer = request(target, target.key, **_body({"json": '{"type": "integer"}'}))
    assert status == 200, answer
    outcomes = [_timed(target, {kind: source}) for size in sizes for kind, source in _unterminated(size - 256)]
    answers = "/".join(str(status) for status in dict.fromkeys(status for status, _, _ in outcomes))
    slowest, dearest = max(seconds for _, seconds, _ in outcomes), max(cpu for _, _, cpu in outcomes)
    wrong = [f"answered with {answers}"] if answers != "400" else []
    if dearest > MAX_CPU_SECONDS:
        wrong.append(f"one answer cost {dearest:.1f} s of processor time")
    late = [f"an answer took {slowest * 1e3:.0f} ms"] if slowest > MAX_SECONDS else []
    return Outcome(f"{answers} in {slowest * 1e3:.0f} ms", wrong, late)


def _unterminated(size: int) -> list[tuple[str, str]]:
    quotes = '\\"' * (size // 4)  # JSON doubles the backslash and escapes the quote
    return [
        ("json", '{"a": "' + quotes),
        ("structural_tag", '{"structures": [{"begin": "' + quotes),
        ("grammar", 'root ::= "' + quotes + "\\"),
    ]


def _body(constraint: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "max_tokens": 4, "structured_outputs": constraint}


def _timed(target: Target, constraint: dict[str, Any]) -> tuple[int, float, float]:
    """Return the status, the seconds until it came, and the gateway's processor time meanwhile."""
    data = post(target, json.dumps(_body(constraint)).encode(), key=target.key)
    with Wire(target) as wire:
        cpu, began = _cpu(target), time.monotonic()
        wire.send(data)
        status, at = wire.first_byte()
        return status, at - began, _cpu(target) - cpu


def _cpu(target: Target) -> float:
    times = target.gateway.cpu_times()
    return times.user + times.system


ATTACKS = [Attack("quadratic-string", quadratic_string, max_growth=20)]
