"""Files of one object a line."""

import contextlib
import os
from pathlib import Path

import pytest

from tokenloom.cli.batch import jsonl
from tokenloom.cli.batch.jsonl import MAX_DEPTH, LineWriter, count_lines, parse, read_lines
from tokenloom.cli.failures import CommandFailed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def test_blank_lines_count_as_lines_and_are_not_read(path: Path) -> None:
    path.write_text("a\n\n  \nb")
    assert list(read_lines(path)) == [(1, "a\n"), (4, "b")]
    assert count_lines(path) == 2


def test_what_a_kill_tore_is_removed_and_the_rest_is_kept(path: Path) -> None:
    with LineWriter(path) as writer:
        assert writer.written == []
        writer.write({"id": 1, "text": "é"})
        writer.write({"id": 2})
    with open(path, "a") as stream:
        stream.write('{"id": 3, "te')
    with LineWriter(path) as writer:
        assert [line["id"] for line in writer.written] == [1, 2]
        writer.write({"id": 3})
    assert path.read_text() == '{"id": 1, "text": "é"}\n{"id": 2}\n{"id": 3}\n'


def test_overwriting_begins_anew_with_the_first_line(path: Path) -> None:
    path.write_text("anything")
    with LineWriter(path, overwrite=True) as writer:
        assert writer.written == []
        assert path.read_text() == "anything"
        writer.write({"id": 1})
        assert path.read_text() == '{"id": 1}\n'
        writer.write({"id": 2})
    assert path.read_text() == '{"id": 1}\n{"id": 2}\n'


def test_overwriting_with_nothing_empties_the_file_unless_something_failed(path: Path) -> None:
    path.write_text("anything")
    with contextlib.suppress(CommandFailed), LineWriter(path, overwrite=True):
        raise CommandFailed("no model")
    assert path.read_text() == "anything"
    with LineWriter(path, overwrite=True):
        pass
    assert path.read_text() == ""


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_regular_file_holds_no_lines(overwrite: bool) -> None:
    with LineWriter(Path("/dev/null"), overwrite=overwrite) as writer:
        writer.write({"id": 1})
        assert writer.written == []


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000])
def test_what_is_nested_too_deeply_is_no_line(depth: int) -> None:
    for begin, end in (("[", "]"), ('{"a":', "}")):
        assert parse(begin * MAX_DEPTH + "1" + end * MAX_DEPTH)
        with pytest.raises(ValueError, match="nested"):
            parse(begin * depth + "1" + end * depth)


def test_bytes_that_are_no_text_are_a_fault_of_their_line_only(path: Path) -> None:
    path.write_bytes(b'"a"\n"\xff"\n"b"\n')
    (_, first), (_, second), (_, third) = read_lines(path)
    assert (parse(first), parse(third)) == ("a", "b")
    with pytest.raises(ValueError, match="UTF-8"):
        parse(second)


def test_one_process_at_a_time(path: Path) -> None:
    with LineWriter(path), pytest.raises(CommandFailed, match="in use by another process"):
        LineWriter(path)


def test_a_file_of_something_else_is_left_alone(path: Path) -> None:
    path.write_text("my diary\n")
    with pytest.raises(CommandFailed, match="line 1 is not a JSON object"):
        LineWriter(path)
    assert path.read_text() == "my diary\n"


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_CHARS", 1000)
    with pytest.raises(CommandFailed, match="line 1 of /dev/full has more than 1,000 characters"):
        list(read_lines(Path("/dev/full")))


def test_a_pipe_is_read_once_only(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    ends = os.open(path, os.O_RDWR)  # keeps both ends open, so that opening one does not wait
    try:
        os.write(ends, b"1\n2\n")
        assert count_lines(path) is None
        lines = read_lines(path)
        assert [next(lines), next(lines)] == [(1, "1\n"), (2, "2\n")]
    finally:
        os.close(ends)


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"cannot read .*nothing: No such file"):
        list(read_lines(tmp_path / "nothing"))
    with pytest.raises(CommandFailed, match="cannot write"):
        LineWriter(tmp_path)
