"""The process that decodes gets ready as fast as any other, and takes what others leave only afterwards."""

import resource
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenloom.process import helper_pipe
from tokenloom.services.encoder import decode_worker
from tokenloom.services.encoder.decode_worker import DecodeSetup


def test_it_loads_before_it_is_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    messages = [msgspec.msgpack.encode(DecodeSetup("/model", 1, 1.0, 1.0, 1)), None]

    def note(what: str, result: Any = None) -> Callable[..., Any]:
        return lambda *_: done.append(what) or result

    monkeypatch.setattr(decode_worker, "_load", note("load"))
    monkeypatch.setattr(decode_worker, "confine", lambda **_: done.append("confine") or True)
    monkeypatch.setattr(decode_worker, "yield_processors", note("yield"))
    monkeypatch.setattr(resource, "setrlimit", note("limit"))
    for name in ("begin", "limit_memory", "limit_time", "write_message"):
        monkeypatch.setattr(helper_pipe, name, note(name))
    monkeypatch.setattr(helper_pipe, "read_message", lambda: messages.pop(0))
    decode_worker.main()
    assert done == ["begin", "load", "yield", "limit_memory", "limit", "confine", "write_message", "limit_time"]
