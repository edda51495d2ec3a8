"""The limits of control groups, versions 1 and 2, are read from every group above the process."""

from pathlib import Path

import pytest

from tokenloom.process.control_groups import CpuGroups, memory_limit


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_strictest_group_of_version_2_counts(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/pods/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pods/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n",
        "sys/fs/cgroup/pods/one/cpu.stat": "usage_usec 9\n",
    }
    root = write(tmp_path, groups)
    assert CpuGroups(root).limit() == 1.5
    assert CpuGroups(root).throttled_seconds() == 2.5


def test_version_1(tmp_path: Path) -> None:
    groups = {
        "proc/self/cgroup": "5:cpu,cpuacct:/pod\n4:memory:/pod\n0::/\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu/pod/cpu.stat": "nr_periods 8\nnr_throttled 2\nthrottled_time 1500000000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = write(tmp_path, groups)
    assert CpuGroups(root).limit() == 0.5
    assert CpuGroups(root).throttled_seconds() == 1.5


def test_in_a_container_the_path_is_the_hosts(tmp_path: Path) -> None:
    groups = {"proc/self/cgroup": "0::/kubepods/pod7\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert CpuGroups(write(tmp_path, groups)).limit() == 2.0


@pytest.mark.parametrize("groups", [{}, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}])
def test_without_a_limit(tmp_path: Path, groups: dict[str, str]) -> None:
    root = write(tmp_path, groups)
    assert CpuGroups(root).limit() is None
    assert CpuGroups(root).throttled_seconds() == 0.0


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
def test_the_memory_of_the_strictest_group_counts(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert memory_limit(write(tmp_path, files)) == limit
