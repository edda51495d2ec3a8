"""Grammars that take long to compile, whose senders leave at once."""

import json
import re
import time
from typing import Any

from tests.attack.attack import Attack, Outcome
from tests.attack.target import MODEL, Target
from tests.attack.wire import Wire, post, request

MAX_SECONDS = 5.0
CODE = "[0-9]{4}"
_SETTLE_SECONDS = 1.0
"""How long the senders stay: until the mesh has begun to compile."""


def bomb(number: int) -> dict[str, Any]:
    """Return a grammar that takes more than a second; every number makes another one."""
    return {"json": {"type": "integer", "multipleOf": 99_999_989 + 2 * number}}


def _constrained(constraint: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "max_tokens": 20, "structured_outputs": constraint}


def abandoned_bombs(target: Target, num: int = 256) -> Outcome:
    """Send bombs with one key, leave, and ask for a small grammar with the other key."""
    alone = _lone_bomb_seconds(target)
    wires = [Wire(target) for _ in range(num)]
    try:
        for number, wire in enumerate(wires):
            wire.send(post(target, json.dumps(_constrained(bomb(number))).encode(), key=target.key))
        time.sleep(_SETTLE_SECONDS)
        refused = sum(wire.is_closed(0) for wire in wires)
    finally:
        for wire in wires:
            wire.close()
    began = time.monotonic()
    status, answer = request(target, target.neighbour, **_constrained({"regex": CODE}))
    seconds = time.monotonic() - began
    wrong = [] if status == 200 else [f"the neighbour was answered with {status}: {answer}"]
    if status == 200 and not re.fullmatch(CODE, answer["choices"][0]["text"]):
        wrong.append(f"the neighbour got {answer['choices'][0]['text']!r}")
    late = [f"the neighbour waited {seconds:.1f} s"] if seconds > MAX_SECONDS else []
    summary = f"{refused} of {num} refused; neighbour {seconds:.1f} s"
    assert refused < num, "every bomb was refused at once"
    return Outcome(f"{summary} (a bomb: {alone:.1f} s)", wrong, late)


def _lone_bomb_seconds(target: Target) -> float:
    began = time.monotonic()
    status, answer = request(target, target.key, **_constrained(bomb(-1)))
    assert status in (200, 400), answer
    seconds = time.monotonic() - began
    assert seconds > 0.1, f"a bomb takes only {seconds:.2f} s, so the others prove nothing"
    return seconds


ATTACKS = [Attack("abandoned-bombs", abandoned_bombs)]
