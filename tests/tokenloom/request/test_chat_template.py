"""A chat template that a user names is a file or Jinja itself."""

from pathlib import Path

import pytest

from tokenloom.request import chat_template
from tokenloom.request.chat_template import check_chat_template, read_chat_template
from tokenloom.request.errors import InvalidArgument

JINJA = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_file_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "{{x}}").write_text("of the file")
    monkeypatch.chdir(tmp_path)
    assert read_chat_template("{{x}}") == "of the file"
    assert read_chat_template(str(tmp_path / "{{x}}")) == "of the file"


@pytest.mark.parametrize("given", [JINJA, "line\nline", "{{" + "x" * 5000 + "}}", "{{\0}}"])
def test_braces_and_line_breaks_are_jinja(given: str) -> None:
    assert read_chat_template(given) == given
    assert check_chat_template(given) == given


def test_a_missing_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"chat template: no such file: 'nowhere\.jinja'; name a file, or"):
        read_chat_template("nowhere.jinja")
    with pytest.raises(ValueError, match=r"^no such file"):
        check_chat_template(str(tmp_path))
    assert check_chat_template("") == ""


def test_files_that_are_no_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="is not UTF-8 text"):
        read_chat_template(str(path))
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_BYTES", 1)
    with pytest.raises(InvalidArgument, match="more than 1 bytes"):
        read_chat_template(str(path))
