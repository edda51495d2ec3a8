"""Tests that the limit of a pod is found, in both versions of control groups."""

from pathlib import Path

import pytest

from tokenloom.services.runtime.host.memory_limit import memory_limit


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "536870912\n"}, 512 << 20),
        (
            {
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/memory.max": "1000\n",
                "sys/fs/cgroup/pods/one/memory.max": "2000\n",
            },
            1000,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
            },
            3000,
        ),
    ],
)
def test_the_strictest_group_counts(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == limit
