"""Lines on their way to the terminal."""

import io
import os

import pytest

from tokenloom.supervisor.output import LineCopier, Tail, prefixed


def test_lines_are_copied_whole_with_their_part() -> None:
    seen: list[tuple[str, str]] = []
    copier = LineCopier(lambda name, line: seen.append((name, line)))
    with open(copier.open("engine-0"), "wb") as stream:
        stream.write(b"one\ntwo\r\n\xff three\nlast")
    copier.close()
    assert seen == [("engine-0", "one"), ("engine-0", "two"), ("engine-0", "\ufffd three"), ("engine-0", "last")]


def test_the_time_since_the_last_line_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("tokenloom.supervisor.output.time.monotonic", lambda: now)
    copier = LineCopier(lambda name, line: None)
    now = 7.5
    assert copier.quiet_seconds() == 2.5
    copier.say("engine-0", "a line")
    assert copier.quiet_seconds() == 0.0


def test_an_endless_line_is_cut() -> None:
    seen: list[str] = []
    copier = LineCopier(lambda name, line: seen.append(line))
    with open(copier.open("engine-0"), "wb") as stream:
        stream.write(b"x" * 100_000)
    copier.close()
    assert [len(line) for line in seen] == [65536, 100_000 - 65536]


def test_prefixes_line_up_and_have_no_colour_in_a_file() -> None:
    stream = io.StringIO()
    write_line = prefixed(stream)
    write_line("engine-0", "hello")
    write_line("output_processor-0", "hello")
    assert stream.getvalue() == "engine-0           | hello\noutput_processor-0 | hello\n"


def test_services_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    prefixed(stream)("engine-0", "hello")
    assert stream.getvalue().startswith("\x1b[32mengine-0")
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    plain = Terminal()
    prefixed(plain)("engine-0", "hello")
    assert "\x1b" not in plain.getvalue()


def test_the_tail_keeps_the_last_lines() -> None:
    tail = Tail(lines=2)
    for line in ("one", "two", "three"):
        tail("engine-0", line)
    assert tail.text().splitlines() == ["engine-0           | two", "engine-0           | three"]
