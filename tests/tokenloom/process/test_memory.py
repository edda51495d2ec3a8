"""Memory limits, over a file tree like the kernel's."""

import ctypes
import gc
import io
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenloom.process import memory
from tokenloom.process.memory import available_memory, forget_libraries, forget_mapped, forget_start, peak_of

KIB = 1024
HOST = {
    "proc/meminfo": "MemTotal:       16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n",
    "proc/self/cgroup": "",
}


@pytest.fixture
def tree(tmp_path):
    def write(files):
        for path, text in (HOST | files).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def test_without_a_control_group_the_host_decides(tree):
    assert available_memory(tree({})) == 8000 * KIB


def test_without_the_kernels_list_of_groups_the_host_decides(tree, tmp_path):
    """As in a sandbox."""
    root = tree({})
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(root) == 8000 * KIB


def test_version_2_every_level_counts_and_page_cache_can_be_dropped(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/memory.max": f"{5000 * KIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3000 * KIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {1000 * KIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
        }
    )
    assert available_memory(root) == 3000 * KIB


def test_version_2_root_of_a_container_is_its_own_group(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/system.slice/not-mounted-here\n",
            "sys/fs/cgroup/memory.max": f"{2000 * KIB}\n",
            "sys/fs/cgroup/memory.current": f"{500 * KIB}\n",
        }
    )
    assert available_memory(root) == 1500 * KIB


def test_version_1(tree):
    root = tree(
        {
            "proc/self/cgroup": "4:cpu,memory:/a\n3:cpuset:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{4000 * KIB}\n",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{3000 * KIB}\n",
            "sys/fs/cgroup/memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {500 * KIB}\n",
        }
    )
    assert available_memory(root) == 1500 * KIB


def test_a_group_above_its_limit_leaves_nothing(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "5000\n",
        }
    )
    assert available_memory(root) == 0


def test_this_machine_has_memory():
    assert available_memory() > 1 << 20


def test_pages_of_files_that_a_call_reads_are_not_its_peak(tmp_path):
    size = 64 << 20
    (tmp_path / "weights").write_bytes(bytes(size))
    weights = np.memmap(tmp_path / "weights", dtype=np.uint8, mode="r")
    assert peak_of(lambda: weights[:: mmap.PAGESIZE].sum()) < size // 4


def test_peak_sees_what_a_call_gave_back():
    size = 64 << 20

    def touch() -> None:
        # A mapping of its own: memory that the allocator has kept since an earlier test is resident already.
        with mmap.mmap(-1, size) as pages:
            pages[:: mmap.PAGESIZE] = b"x" * (size // mmap.PAGESIZE)

    gc.collect()  # what earlier tests left, such as mapped files, must not end during the call
    assert peak_of(touch) >= size * 0.9


def test_mapped_files_are_forgotten_and_read_again(tmp_path):
    path, other = tmp_path / "weights", tmp_path / "other"
    for file in (path, other):
        file.write_bytes(b"x" * (8 << 20))
    maps = [np.memmap(file, dtype=np.uint8, mode="r") for file in (path, other)]
    assert all((mapped == ord("x")).all() for mapped in maps)
    assert min(resident(path), resident(other)) == 8 << 20
    forget_mapped([maps[0].ctypes.data + 5])
    assert (resident(path), resident(other)) == (0, 8 << 20)
    assert maps[0][5] == ord("x")


def test_forgotten_files_stay_in_the_page_cache(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (8 << 20))
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    assert (mapped == ord("x")).all()
    forget_mapped([mapped.ctypes.data])
    assert in_page_cache(path) == 8 << 20


def in_page_cache(path):
    """Bytes of a file that the page cache holds."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        present = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        content = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(content), ctypes.c_size_t(len(mapped)), present) == 0
        del content
    return sum(state & 1 for state in present) * mmap.PAGESIZE


def resident(path):
    """Bytes of the mappings of a file that this process has in memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    sizes = [
        next(int(rest.split()[1]) << 10 for rest in lines if rest.startswith("Rss:"))
        for line in lines
        if line.endswith(str(path))
    ]
    assert sizes, f"{path} is not mapped"
    return sum(sizes)


def test_forgetting_never_loses_what_was_written(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 8192)
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    mapped[0] = ord("y")
    forget_mapped([mapped.ctypes.data])
    assert bytes(mapped[:2]) == b"yx"


def test_what_the_system_swapped_out_was_written_to(tmp_path, monkeypatch):
    """As of a library's relocated addresses, once the host was short of memory: reading them again gives the file's."""

    def swapped(path, **options):
        text = Path(path).read_text(**options)
        return io.StringIO(re.sub(r"(Anonymous:)( +[1-9]\d* kB)([^-]*Swap:) +0 kB", r"\1 0 kB\3\2", text))

    path = tmp_path / "weights"
    path.write_bytes(b"x" * 8192)
    mapped = np.memmap(path, dtype=np.uint8, mode="c")
    mapped[0] = ord("y")
    monkeypatch.setattr(memory, "open", swapped, raising=False)
    forget_mapped([mapped.ctypes.data])
    assert bytes(mapped[:2]) == b"yx"


def test_libraries_are_forgotten_but_for_what_was_written(tmp_path):
    (tmp_path / "a folder").mkdir()
    inside, written, outside = tmp_path / "a folder/one.so.1", tmp_path / "a folder/two.so", tmp_path / "a folder.so"
    weights = tmp_path / "a folder/model.safetensors"
    for path in (inside, written, outside, weights):
        path.write_bytes(b"x" * (8 << 20))
    maps = [
        np.memmap(path, dtype=np.uint8, mode=mode)
        for path, mode in ((inside, "r"), (written, "c"), (outside, "r"), (weights, "r"))
    ]
    maps[1][0] = ord("y")
    assert all((mapped[1:] == ord("x")).all() for mapped in maps)
    (tmp_path / "link").symlink_to(tmp_path / "a folder")
    forget_libraries([tmp_path / "link", tmp_path / "none"])
    assert [resident(path) for path in (inside, written, outside, weights)] == [0, *[8 << 20] * 3]
    assert maps[0][0] == ord("x")
    assert maps[1][0] == ord("y")


def test_torch_computes_with_what_is_mapped_again():
    matrix = torch.eye(8)
    before = resident("libtorch_cpu.so")
    forget_start()
    assert resident("libtorch_cpu.so") < before
    assert torch.equal(matrix @ matrix, matrix)
