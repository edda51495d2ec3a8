"""Lines on their way to the terminal."""

import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable

import pytest

from tokenloom.supervisor.output import LineCopier, Tail, WriteLine, bare, prefixed, unbuffered


def test_lines_are_copied_whole_with_their_part() -> None:
    seen: list[tuple[str, str]] = []
    copier = LineCopier(lambda name, line: seen.append((name, line)))
    with open(copier.open("engine-0"), "wb") as stream:
        stream.write(b"one\ntwo\r\n\xff three\nlast")
    copier.close()
    assert seen == [("engine-0", "one"), ("engine-0", "two"), ("engine-0", "\ufffd three"), ("engine-0", "last")]


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "logs"]


def test_one_thread_copies_all_streams_and_ends_with_the_last() -> None:
    seen: list[tuple[str, str]] = []
    copier = LineCopier(lambda name, line: seen.append((name, line)))
    names = [f"engine-{number}" for number in range(20)]
    with contextlib.ExitStack() as parts:
        streams = [parts.enter_context(open(copier.open(name), "wb", buffering=0)) for name in names]
        for turn in ("be", "gin\nand", " end\nno", " newline"):
            for stream in streams:
                stream.write(turn.encode())
        assert len(log_threads()) == 1
    copier.close()
    assert not log_threads()
    for name in names:
        assert [line for each, line in seen if each == name] == ["begin", "and end", "no newline"]


def test_a_stream_that_comes_after_the_last_has_ended_is_copied_too() -> None:
    seen: list[str] = []
    copier = LineCopier(lambda name, line: seen.append(line))
    for number in range(3):
        with open(copier.open("engine-0"), "wb") as stream:
            stream.write(b"run %d" % number)
        copier.close()
    assert seen == ["run 0", "run 1", "run 2"]


def test_a_pipe_that_no_thread_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    copier = LineCopier(lambda name, line: None)
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            copier.open("engine-0")
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1, "only what waits for streams was opened"
    with open(copier.open("engine-0"), "wb") as stream:
        stream.write(b"a line")
    copier.close()


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


class FullDisk(io.StringIO):
    """A file that takes nothing while ``is_full``."""

    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


@pytest.mark.parametrize("make", [prefixed, bare])
def test_a_log_that_cannot_be_written_ends_nothing_and_says_later_what_is_missing(
    make: Callable[[io.StringIO], WriteLine],
) -> None:
    stream = FullDisk()
    copier = LineCopier(make(stream))
    with open(copier.open("engine-0"), "wb") as part:
        part.write(b"lost\nlost too\n")
    copier.close()
    copier.say("engine-0", "lost as well")
    stream.is_full = False
    copier.say("engine-0", "the disk has room")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("3 lines are missing here: the log could not be written (No space left on device)")
    assert second.endswith("the disk has room")


def test_a_closed_log_ends_nothing() -> None:
    stream = io.StringIO()
    copier = LineCopier(prefixed(stream))
    stream.close()
    copier.say("engine-0", "hello")


def test_an_unbuffered_stream_keeps_nothing_that_cannot_be_written() -> None:
    """What stayed in the buffer would come twice, and fail again when the interpreter ends."""
    with open("/dev/full", "w") as full:
        copier = LineCopier(prefixed(unbuffered(full)))
        copier.say("engine-0", "hello")
        full.flush()


def test_a_log_that_another_process_has_made_non_blocking_loses_no_line() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    read = bytearray()

    def read_all() -> None:
        while piece := os.read(read_end, 65536):
            read.extend(piece)

    reader = threading.Thread(target=read_all, daemon=True)
    with open(write_end, "w") as stream:
        copier = LineCopier(bare(unbuffered(stream)))
        for number in range(3000):  # more than a pipe holds
            copier.say("engine-0", f"{number} {'x' * 200}")
            if number == 10:
                reader.start()
    reader.join(30)
    os.close(read_end)
    assert [int(line.split()[0]) for line in read.decode().splitlines()] == list(range(3000))


def test_a_part_whose_log_has_no_reader_writes_on() -> None:
    """The copier goes on reading, so that the part neither waits nor gets SIGPIPE."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with contextlib.suppress(BrokenPipeError), open(write_end, "w") as stream:
        copier = LineCopier(prefixed(stream))
        with open(copier.open("engine-0"), "wb") as part:
            for _ in range(2000):  # more than a pipe holds
                part.write(b"x" * 100 + b"\n")
        copier.close()
