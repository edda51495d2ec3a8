"""Measures how much memory this process may still take, and a call's peak. Linux only; in bytes."""

import contextlib
import ctypes
import mmap
import site
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .control_groups import memory_limits

_KIB = 1024
_MADV_PAGEOUT = 21  # needs Linux 5.4; an older kernel refuses it, and the pages stay


def available_memory(root: Path = Path("/")) -> int:
    """Return the host's available memory, or what the control group still allows if that is less."""
    lines = (line.partition(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = next(int(rest.split()[0]) for name, _, rest in lines if name == "MemAvailable")
    return min([available * _KIB, *_cgroup_room(root)])


def peak_of(call: Callable[[], None]) -> int:
    """Run the call and return by how much its peak exceeded the resident memory before it.

    Pages of mapped files that the call reads, such as weights, do not count: the system can drop them. If the kernel
    does not let a process reset its peak, the peak since the process began counts, which is never too low.
    """
    before, files = status_bytes("VmRSS"), status_bytes("RssFile")
    with contextlib.suppress(OSError):
        # 5 resets the peak (VmHWM) of this process, which Linux otherwise only lets grow.
        Path("/proc/self/clear_refs").write_text("5")
    call()
    # Mapped weights that the call touched for the first time count as resident, yet the system can drop them.
    read = max(0, status_bytes("RssFile") - files)
    return max(0, status_bytes("VmHWM") - before - read)


def return_freed() -> None:
    """Make the allocator return free whole pages to the system."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def forget_mapped(addresses: Iterable[int]) -> None:
    """Drop the resident pages of the mapped files at ``addresses``; they are read again when they are touched.

    The caller keeps the mappings meanwhile: where another thread had ended one, its own memory could lie by now. The
    pages stay in the page cache, from which the next process loads the same files. A mapping that was written to is
    only asked for a page-out, which takes longer and also empties the page cache, but never loses content.
    """
    wanted = list(addresses)
    for each in _mappings():
        if any(each.begin <= address < each.end for address in wanted):
            # A page-out took 0.2 s for 1.2 GB and emptied the page cache of a third of the file, so that the next
            # engine read it from the disk. qwen3-0.6b loads in 0.48 s this way instead of 0.77.
            _advise(each, _MADV_PAGEOUT if each.is_written else mmap.MADV_DONTNEED)


def forget_start() -> None:
    """Drop what only the start of this process needed of installed libraries, and freed memory. To be called once,
    before it serves or warms up."""
    forget_libraries(map(Path, site.getsitepackages()))
    return_freed()


def forget_libraries(folders: Iterable[Path]) -> None:
    """Drop the resident pages of the shared libraries in these folders, except what was written to; those in use are
    mapped again from the page cache when they are touched. Only for libraries that nothing unloads."""
    # Importing torch touches 66 MB of its libraries: tables of relocations, and code that registers operations. Steps
    # need 12 MB of them. Of gRPC and the others a service keeps a third.
    inside = tuple(f"{folder.resolve()}/" for folder in folders)
    with contextlib.suppress(OSError):  # where the system shows no mappings, the pages stay
        for each in _mappings():
            # Another thread may write to what is writable meanwhile.
            is_kept = each.is_writable or each.is_written or ".so" not in each.path.rpartition("/")[2]
            if each.path.startswith(inside) and not is_kept:
                _advise(each, mmap.MADV_DONTNEED)


class _Mapping(NamedTuple):
    """A part of this process's memory."""

    begin: int
    end: int
    path: str
    """Of the file that is mapped; empty: none."""
    is_writable: bool
    is_written: bool
    """Whether pages of it were written to."""


def _mappings() -> Iterator[_Mapping]:
    begin = end = num_own = 0
    rights = path = ""
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            field, _, rest = line.partition(" ")
            if field == "Anonymous:":
                num_own = int(rest.split()[0])
            elif field == "Swap:":  # behind the other; pages that were written to are in one or the other
                yield _Mapping(begin, end, path, "w" in rights, num_own + int(rest.split()[0]) > 0)
            elif not field.endswith(":"):
                begin, end = (int(address, 16) for address in field.split("-"))
                rights, _offset, _device, _inode, *named = rest.rstrip("\n").split(maxsplit=4)
                path = "".join(named)  # which may hold blanks


def _advise(mapping: _Mapping, advice: int) -> None:
    size = ctypes.c_size_t(mapping.end - mapping.begin)
    ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(mapping.begin), size, advice)


def status_bytes(field: str) -> int:
    """Return a field of this process's memory, such as ``VmRSS``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * _KIB
    raise AssertionError(f"/proc/self/status has no {field}")


def _cgroup_room(root: Path) -> Iterator[int]:
    """Yield for every group above this process its limit, less what it uses apart from page cache."""
    for limit, group in memory_limits(root):
        version = "memory.current" if (group / "memory.current").exists() else "memory.usage_in_bytes"
        used = _number(group / version) or 0
        yield max(0, limit - max(0, used - _inactive_file(group)))


def _inactive_file(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    """Return the number in a file, or None if there is no file or it says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
