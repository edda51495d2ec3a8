"""Files of one object a line."""

from pathlib import Path

import pytest

from tokenloom.cli.batch.jsonl import LineWriter, count_lines, read_lines
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


def test_overwriting_begins_anew(path: Path) -> None:
    path.write_text("anything")
    with LineWriter(path, overwrite=True) as writer:
        assert writer.written == []
    assert path.read_text() == ""


def test_one_process_at_a_time(path: Path) -> None:
    with LineWriter(path), pytest.raises(CommandFailed, match="in use by another process"):
        LineWriter(path)


def test_a_file_of_something_else_is_left_alone(path: Path) -> None:
    path.write_text("my diary\n")
    with pytest.raises(CommandFailed, match="line 1 is not a JSON object"):
        LineWriter(path)
    assert path.read_text() == "my diary\n"


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"cannot read .*nothing: No such file"):
        list(read_lines(tmp_path / "nothing"))
    with pytest.raises(CommandFailed, match="cannot write"):
        LineWriter(tmp_path)


def test_what_is_no_text_is_named(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(CommandFailed, match="not UTF-8"):
        list(read_lines(path))
