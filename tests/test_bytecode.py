"""What is compiled before the processes that run tests side by side start."""

from pathlib import Path

import pytest

from tests import bytecode


@pytest.mark.parametrize("text", [b"def (", b"\0", b"\xff"])
@pytest.mark.parametrize("name", ["test_half.py", "half.py"])
def test_a_file_that_is_not_complete_ends_no_run_of_others(
    name: str, text: bytes, tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytecode, "_config", pytestconfig, raising=False)
    (tmp_path / name).write_bytes(text)
    bytecode._compile(tmp_path / name)
