import os
from pathlib import Path

import pytest

from tokenloom.model_files import checkpoint
from tokenloom.model_files.checkpoint import cached_digest, digest_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").write_bytes(b"one")
    return tmp_path / "weights"


def test_a_file_of_the_same_size_and_time_is_another_one(file: Path, tmp_path: Path) -> None:
    """Images whose files are all of one time, and copies that keep times, bring such files."""
    stat = file.stat()
    cached_digest([file], tmp_path / "cache")
    file.write_bytes(b"two")
    while file.stat().st_ctime_ns == stat.st_ctime_ns:  # the clock of the file system ticks some hundred times a second
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached_digest([file], tmp_path / "cache") == digest_of([file])


def test_a_digest_of_a_file_that_changes_while_it_is_read_is_not_kept(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(files: list[Path]) -> bytes:
        file.write_bytes(b"another")
        return digest_of(files)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digest_of", overtaken)
        cached_digest([file], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
