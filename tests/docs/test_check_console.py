"""Nothing that pages have started is left."""

from pathlib import Path

import psutil
import pytest

from tests.docs import check_console
from tests.docs.check_console import Failed, Reader
from tests.docs.console_blocks import Typed


def test_what_ctrl_c_does_not_end_fails_its_page_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_console, "_END_SECONDS", 0.3)
    reader = Reader(tmp_path, tmp_path, ())
    for text in ("trap '' INT; echo ' served at '; while :; do sleep 60; done", "echo ' served at '; exec sleep 60"):
        reader._serve(Typed("page.md", 1, text), " served at ", 1)
    servers = [psutil.Process(each.pid) for each in reader._servers]
    with pytest.raises(Failed, match="not ended by Ctrl-C"):
        reader.end()
    assert reader._servers == []
    assert not any(each.is_running() for each in servers)
