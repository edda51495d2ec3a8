"""Writes log lines for people or as JSON. Control characters are escaped: one event is always one line."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

from .tracing import CURRENT, Headers


def setup(service: str, instance_id: str, *, level: str = "info", style: Literal["human", "json"] = "human") -> None:
    """Send all logging of this process to stderr. ``main`` calls this once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance_id) if style == "json" else HumanFormatter(instance_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Adds ``request_id`` to each line: ``RequestLog(log, request_id).info("placed on %s", engine)``."""

    def __init__(self, logger: logging.Logger, request_id: str, trace_headers: Headers | None = None) -> None:
        """``trace_headers``: the request's trace, if it differs from the current task's (:data:`tracing.CURRENT`)."""
        super().__init__(logger, {"request_id": request_id, "trace_headers": trace_headers})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs


class RareLine:
    """Counts what a line of the log reports, and bounds how often the line is written: clients cause it, and must not
    be able to fill the log. A line for each refusal would also cost more than the refusal."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``seconds``: the least time between two lines. ``clock``: monotonic seconds."""
        self._seconds = seconds
        self._clock = clock
        self._written_at = -math.inf
        self._count = 0

    def add(self) -> int:
        """Count one more. Return how many there were since the last line, if one is to be written now; 0: it is not."""
        self._count += 1
        if (now := self._clock()) - self._written_at < self._seconds:
            return 0
        count, self._count, self._written_at = self._count, 0, now
        return count


def with_fields(request_id: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Return the ``extra`` of a log call: the id of its line, and fields that follow the message, or that are members
    of the JSON object."""
    return {"request_id": request_id, "fields": fields}


class HumanFormatter(logging.Formatter):
    """Formats a line as ``12:00:00.123 INFO engine-0 services.engine [request] message name=value``."""

    def __init__(self, instance_id: str) -> None:
        super().__init__()
        self._instance_id = instance_id

    def format(self, record: logging.LogRecord) -> str:
        clock = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{int(record.msecs):03d}"
        name = record.name.removeprefix("tokenloom.")
        request = f" [{request_id}]" if (request_id := getattr(record, "request_id", "")) else ""
        text = record.getMessage() + _pairs(record)
        line = escape(f"{clock} {record.levelname} {self._instance_id} {name}{request} {text}")
        if record.exc_info:
            line += "\n" + "\n".join(map(escape, self.formatException(record.exc_info).split("\n")))
        return line


class JsonFormatter(logging.Formatter):
    """Formats a line as a JSON object: time (s since the epoch), level, service, instance, logger, message and more."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._common = {"service": service, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            **self._common,
        }
        fields |= {"logger": record.name, "message": record.getMessage()}
        if request_id := getattr(record, "request_id", ""):
            fields["request_id"] = request_id
        fields |= getattr(record, "fields", {})
        fields |= _trace_ids(getattr(record, "trace_headers", None) or CURRENT.get())
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)  # escapes control characters and all that is not ASCII


def _pairs(record: logging.LogRecord) -> str:
    """Return the fields of a record as text, with a leading space; a value with spaces or quotes is quoted."""
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return "".join(f" {name}={_quoted(str(value))}" for name, value in fields.items())


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if not value or set(value) & set(' "=') else value


def _trace_ids(headers: Headers) -> Mapping[str, str]:
    """Return the ids of the trace and span that a line belongs to; empty without a trace."""
    ids = headers.get("traceparent", "").split("-")
    return {"trace_id": ids[1], "span_id": ids[2]} if len(ids) == 4 else {}


def escape(text: str) -> str:
    """Escape control characters and line separators, so that a client can neither forge lines nor move the cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
