"""What a page in a browser can send to a gateway on the same machine that needs no key."""

import json

from tests.attack.attack import Attack, Outcome
from tests.attack.target import MODEL, Setup, Target
from tests.attack.wire import Wire, head

OPEN = Setup(keys=False)
_BODY = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 1}).encode()
_FOREIGN = "https://attacker.example"


def _status(target: Target, **fields: str) -> int:
    with Wire(target) as wire:
        wire.send(head(target, key=target.key, Content_Length=str(len(_BODY)), Connection="close", **fields) + _BODY)
        return wire.answer()[0]


def _judge(target: Target, cases: dict[str, dict[str, str]]) -> Outcome:
    """Send each case; all must be refused, and the same request without it must not."""
    own = f"http://{target.host}:{target.port}"
    assert _status(target) == 200
    assert _status(target, Origin=own) == 200, "the gateway's own page is refused"
    statuses = {name: _status(target, **fields) for name, fields in cases.items()}
    wrong = [f"{name}: {status}" for name, status in statuses.items() if not 400 <= status < 500]
    return Outcome("/".join(map(str, dict.fromkeys(statuses.values()))), wrong)


def content_types(target: Target) -> Outcome:
    """Send JSON in the types that a form or a script may send to another origin without asking."""
    types = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
    return _judge(target, {f"type {name!r}": {"Content-Type": name} for name in types})


def origins(target: Target) -> Outcome:
    """Send the origin of another site."""
    foreign = (_FOREIGN, "null", f"http://localhost.attacker.example:{target.port}", f"http://{target.host}:1")
    return _judge(target, {f"origin {name}": {"Origin": name} for name in foreign})


def hosts(target: Target) -> Outcome:
    """Send the name of another site, as a page does whose name was made to point here."""
    foreign = ("attacker.example", f"attacker.example:{target.port}", "127.0.0.1.attacker.example", "10.0.0.1")
    return _judge(target, {f"host {name}": {"Host": name} for name in foreign})


ATTACKS = [
    Attack("content-types", content_types, OPEN),
    Attack("foreign-origins", origins, OPEN),
    Attack("foreign-hosts", hosts, OPEN),
    Attack("content-types-key", content_types),
]
