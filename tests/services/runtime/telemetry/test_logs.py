"""Each event is one log line, whatever a client sends."""

import json
import logging

from tokenloom.services.runtime.telemetry.logs import (
    HumanFormatter,
    JsonFormatter,
    RareLine,
    RequestLog,
    escape,
    with_fields,
)
from tokenloom.services.runtime.telemetry.tracing import CURRENT

EVIL = "line\nINFO forged \x1b[31m \u2028 ü"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("tokenloom.services.x", logging.INFO, "f", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_control_characters_are_escaped() -> None:
    assert escape(EVIL) == "line\\nINFO forged \\x1b[31m \\u2028 ü"
    assert escape("plain ü") == "plain ü"


def test_human_lines() -> None:
    line = HumanFormatter("engine-0").format(record(EVIL, request_id="r1"))
    assert "\n" not in line
    assert "\x1b" not in line
    assert "INFO engine-0 services.x [r1] line\\n" in line


def test_json_lines() -> None:
    line = JsonFormatter("engine", "engine-0").format(record(EVIL, request_id="r1"))
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["service"], fields["instance"], fields["request_id"]) == ("engine", "engine-0", "r1")
    assert (fields["level"], fields["message"]) == ("info", EVIL)


def test_fields_follow_the_message_or_are_members() -> None:
    extra = with_fields("r1", {"route": "/v1", "model": 'a "model"', "seconds": 0.5, "key": ""})
    line = HumanFormatter("gateway-0").format(record("done", **extra))
    assert line.endswith('[r1] done route=/v1 model="a \\"model\\"" seconds=0.5 key=""')
    fields = json.loads(JsonFormatter("gateway", "gateway-0").format(record("done", **extra)))
    assert (fields["request_id"], fields["model"], fields["seconds"]) == ("r1", 'a "model"', 0.5)


def test_a_traced_line_has_its_trace_and_span() -> None:
    formatter = JsonFormatter("engine", "engine-0")
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    fields = json.loads(formatter.format(record("x", trace_headers=headers)))
    assert (fields["trace_id"], fields["span_id"]) == ("a" * 32, "b" * 16)
    token = CURRENT.set(headers)
    try:
        assert json.loads(formatter.format(record("x", trace_headers=None)))["trace_id"] == "a" * 32
    finally:
        CURRENT.reset(token)
    for nothing in (None, {}, {"traceparent": "nonsense"}):
        assert "trace_id" not in json.loads(formatter.format(record("x", trace_headers=nothing)))


def test_exceptions_stay_in_their_lines() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        made = record("failed", exc_info=(type(error), error, error.__traceback__))
    assert "\x1b" not in HumanFormatter("x").format(made)
    assert "ValueError" in json.loads(JsonFormatter("s", "i").format(made))["exception"]


def test_request_log(caplog) -> None:
    with caplog.at_level(logging.INFO):
        RequestLog(logging.getLogger("t"), "r9").info("placed on %s", "engine-1")
    assert caplog.records[0].request_id == "r9"
    assert caplog.records[0].getMessage() == "placed on engine-1"


def test_a_rare_line_counts_what_it_left_out() -> None:
    now = 0.0
    line = RareLine(10.0, lambda: now)
    assert [line.add() for _ in range(3)] == [1, 0, 0]
    now = 9.9
    assert line.add() == 0
    now = 10.0
    assert [line.add(), line.add()] == [4, 0]
