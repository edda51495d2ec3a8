"""Random requests, mostly wrong: bodies, heads and bytes that some client, broken or hostile, might send."""

import json
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenloom.services.gateway.openapi import request_schemas as shapes

MODEL_ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
OTHER_ROUTES = (
    "/v1/models",
    "/v1/models/x/y",
    "/health",
    "/version",
    "/load",
    "/server_info",
    "/docs",
    "/pause",
    "/%2e%2e",
)
_READ_AT_ONCE = 1 << 16
"""Bytes of a request whose answer is never lost because its connection closes amid them."""
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "POST", "TRACE", "BREW")
_TYPES = ("application/json", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "")
_SHAPES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": shapes.with_sampling(shapes.ChatCompletionRequest),
    "/v1/completions": shapes.with_sampling(shapes.CompletionRequest),
    "/tokenize": shapes.TokenizeRequest,
    "/detokenize": shapes.DetokenizeRequest,
}


@dataclass(frozen=True)
class Nonsense:
    """What is sent over one connection, byte by byte.

    Attributes:
        half_closed: The client closes its side after the last byte.
        may_be_dropped: There need be no answer, only an end: its client has left, or still sends what nobody reads.
    """

    data: bytes
    half_closed: bool
    may_be_dropped: bool


def good_bodies(model: str) -> dict[str, dict[str, Any]]:
    """By route."""
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return {
        "/v1/chat/completions": chat,
        "/v1/completions": {"model": model, "prompt": "Once upon", "max_tokens": 3},
        "/tokenize": {"prompt": "Once upon"},
        "/detokenize": {"tokens": [5, 6, 7]},
    }


def nonsense(rng: random.Random, model: str, key: str) -> Nonsense:
    """One request. ``key``: an API key, which most requests present."""
    if rng.random() < 0.1:
        return _request(rng, rng.choice(_METHODS), rng.choice(OTHER_ROUTES), b"", key)
    path, good = rng.choice(list(good_bodies(model).items()))
    body = _encoded(rng, _mutated(rng, path, good))
    if rng.random() < 0.25:
        body = _torn(rng, body)
    method = "POST" if rng.random() < 0.95 else rng.choice(_METHODS)
    return _request(rng, method, path, body, key)


def torn(rng: random.Random, data: bytes) -> bytes:
    """The bytes with one to four things wrong: some flipped, left out, put in or said twice."""
    for _ in range(rng.randint(1, 4)):
        data = _torn(rng, data)
    return data


def _mutated(rng: random.Random, path: str, good: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in msgspec.structs.fields(_SHAPES[path])]
    body = dict(good)
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(names)] = _value(rng)
    if rng.random() < 0.1:
        body["structured_outputs"] = {rng.choice(("json", "grammar", "regex", "structural_tag")): _repetitive(rng)}
    if "messages" in body and rng.random() < 0.5:
        turn = {rng.choice(("role", "content", "name", "tool_calls", "tool_call_id")): _value(rng)}
        body["messages"] = [{"role": rng.choice(("user", "assistant", "tool")), "content": "a"} | turn]
    return body


def _repetitive(rng: random.Random) -> str:
    """Return a text of up to 64 KB that costs a careless parser the square of its length."""
    start = rng.choice(("", '{"a": "', 'root ::= "', "<think>", "<tool_call>", "[TOOL_CALLS]"))
    piece = rng.choice(('\\"', '"', "{", "[", "(", "\\", "/", "{}", '{"a":', "<tool_call>", "a|", "# ", " "))
    return start + piece * (rng.choice((1_000, 30_000, 60_000)) // len(piece))


def _value(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < 0.05:
        return _repetitive(rng)
    plain: tuple[Any, ...] = (
        *(None, True, False, 0, 1, -1, 2, 5, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308, 5e-324),
        *(
            float("nan"),
            float("inf"),
            "",
            "a",
            "Once upon",
            "\0",
            "\x7f",
            "é" * 50,
            "x" * 20_000,
            "null",
            "0",
            "{{ 1 }}",
        ),
        *("<|im_end|>", "\u202e", "auto", "required", "json_object", "(a+)+$", "user", [], {}),
    )
    if depth < 4 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [_value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 40)))]
        names = (
            "type",
            "json",
            "regex",
            "choice",
            "json_schema",
            "schema",
            "function",
            "name",
            "text",
            "$ref",
            "a",
            "1",
        )
        return {rng.choice(names): _value(rng, depth + 1) for _ in range(rng.randint(1, 3))}
    return rng.choice(plain)


def _encoded(rng: random.Random, body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    kind = rng.random()
    if kind < 0.03:
        text = text.replace("1", "1" + "0" * 5000, 1)
    elif kind < 0.06:
        text = text.replace("{", '{"a":' * 3000, 1) + "}" * 3000
    elif kind < 0.09:
        text = text.replace('"', '"\\ud800', 1)
    return text.encode("utf-16" if kind > 0.98 else "utf-8", "surrogatepass")


def _torn(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((1, 2, 8, 64)))
    piece = data[start:end]
    new = rng.choice(
        (b"", rng.randbytes(len(piece)), piece * 2, piece[::-1], rng.choice((b"\0", b'"', b"{", b"]", b"\xff")))
    )
    return data[:start] + new + data[end:]


def _fields(rng: random.Random) -> tuple[bytes, bool]:
    """Return lines of a head or of trailers, often more or longer ones than a server should accept, and whether they
    leave no doubt where the request ends."""
    kind = rng.random()
    if kind < 0.3:
        return b"X-Sum: 1\r\n", True
    if kind < 0.6:
        return b"a: b\r\n" * rng.choice((50, 99, 101, 1000, 20_000)), True
    if kind < 0.9:
        return b"X-Long: %s\r\n" % (b"a" * rng.choice((1000, 65_000, 66_000, 200_000))), True
    wrong = (b"Content-Length: 5\r\n", b"broken\r\n", b": \r\n", b"Transfer-Encoding: chunked\r\n", b"\0: a\r\n")
    return rng.choice(wrong), False


def _key_line(rng: random.Random, key: str) -> str:
    if rng.random() < 0.95:
        return f"Authorization: Bearer {key}"
    return rng.choice(
        ("Authorization: Basic x", "Authorization: Bearer", f"Authorization: Bearer {key}x", "X-Key: none")
    )


def _request(rng: random.Random, method: str, path: str, body: bytes, key: str) -> Nonsense:
    query = rng.choice(("", "", "", "?a=b", "?%ff=%00", "?" + "a" * 2000))
    content_type = rng.choice(_TYPES) if rng.random() < 0.3 else _TYPES[0]
    lines = [
        f"{method} {path}{query} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {content_type}",
        "Connection: close",
        _key_line(rng, key),
    ]
    if rng.random() < 0.1:
        lines.append(
            rng.choice(("X-Request-Id: é", "Accept: nothing/*", "Traceparent: 00-zz-1", "Origin: http://other.example"))
        )
    framing, whole = rng.random(), True
    if framing < 0.1:
        lines.append("Transfer-Encoding: chunked")
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in _pieces(rng, body)) + b"0\r\n"
        trailers, whole = _fields(rng) if rng.random() < 0.5 else (b"", True)
        body += trailers + b"\r\n"
    elif framing < 0.2:
        lines.append(f"Content-Length: {len(body) + rng.choice((1, 100, -1, 10**30))}")
        whole = False
    elif framing < 0.25:
        lines.append(
            rng.choice(("Content-Length: -1", "Content-Length: x", "Transfer-Encoding: gzip", "broken header"))
        )
        whole = False
    else:
        lines.append(f"Content-Length: {len(body)}")
    more, is_clear = _fields(rng) if rng.random() < 0.1 else (b"", True)
    data, whole = "\r\n".join(lines).encode("latin-1") + b"\r\n" + more + b"\r\n" + body, whole and is_clear
    if rng.random() < 0.05:
        data, whole = data[: rng.randrange(1, len(data))], False
    half_closed = not whole or rng.random() < 0.1
    return Nonsense(data, half_closed, may_be_dropped=half_closed or len(data) > _READ_AT_ONCE)


def _pieces(rng: random.Random, body: bytes) -> list[bytes]:
    cut = rng.randrange(len(body) + 1)
    return [piece for piece in (body[:cut], body[cut:]) if piece]
