"""What a commit message must look like."""

from pathlib import Path

import pytest

from tools.commit_subject import main, problem


@pytest.mark.parametrize(
    "message",
    ["Add a flag", "Add a flag\n", "Add a flag\n\nBecause.", "x" * 72, "Merge branch 'a' of " + "b" * 80],
)
def test_good_messages(message: str) -> None:
    assert problem(message) is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("", "subject is empty"),
        ("\n\nbody", "subject is empty"),
        ("x" * 73, "has 73 characters"),
        ("Add a flag.", "full stop"),
        ("Add a flag\nbecause", "second line"),
    ],
)
def test_bad_messages(message: str, words: str) -> None:
    assert words in str(problem(message))


def test_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text("Add a flag")
    assert main([str(file)]) == 0
    file.write_text("Add a flag.")
    assert main([str(file)]) == 1
    assert "full stop" in capsys.readouterr().err
