"""A process is limited by a control group of its own, of version 1 or 2, as long as it is measured."""

import os
from pathlib import Path

import pytest

from tokenloom.bench.shared_machine.cpu_quota import cpu_quota


def test_without_a_place_for_groups_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="run as root, without --quota"), cpu_quota(7, 1.0, tmp_path / "none"):
        pass


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("cpu/cpu.cfs_quota_us", {"cpu/GROUP/cpu.cfs_quota_us": "150000", "cpu/GROUP/cgroup.procs": "7"}),
        ("cgroup.procs", {"GROUP/cpu.max": "150000 100000", "GROUP/cgroup.procs": "7"}),
    ],
)
def test_the_limit_is_written_and_the_group_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, written: dict[str, str]
) -> None:
    monkeypatch.setattr("os.getpid", lambda: 12)
    (tmp_path / given).parent.mkdir(exist_ok=True)
    (tmp_path / given).touch()
    removed: list[Path] = []
    monkeypatch.setattr(Path, "rmdir", lambda path: removed.append(path))  # a control group's files do not keep it
    group = (tmp_path / given).parent / "tokenloom-bench-12"
    monkeypatch.setattr(Path, "mkdir", lambda path: _make_group(path, "cfs" in given))
    with cpu_quota(7, 1.5, tmp_path):
        for name, text in written.items():
            assert (tmp_path / name.replace("GROUP", group.name)).read_text() == text
    assert (group.parent / "cgroup.procs").read_text() == "7"
    assert removed == [group]


def _make_group(path: Path, is_first_version: bool) -> None:
    """Make a directory with the files that the kernel puts into a new control group."""
    os.mkdir(path)
    for name in ("cgroup.procs", *(("cpu.cfs_quota_us",) if is_first_version else ("cpu.max",))):
        (path / name).touch()
