"""What the processes of a mesh occupy while no request runs: memory and threads.

``python -m tests.e2e.footprint`` starts ``tokenloom serve``, waits, and prints a table; its arguments after ``--`` are
those of ``serve``. The memory of a process is its proportional set size: a page that n processes map counts 1/n for
each. Files that processes of other meshes map too, such as torch's libraries, would make a mesh look small; the sum for
all counts each mapped file of the mesh once and whole.
"""

import argparse
import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.e2e.conftest import command_of, serving
from tests.e2e.idle import ask

MOST_THREADS = 60
MOST_BYTES = 450e6
"""For all processes of a mesh with one engine."""
_MODULE = re.compile(r"tokenloom\.services\.([\w.]+)")


@dataclass(frozen=True)
class Footprint:
    """What one process occupies, in bytes."""

    name: str
    """The part or helper that it is."""
    pss: int
    anonymous: int
    """The part of ``pss`` that no file holds."""
    files: dict[str, int]
    """The resident bytes of each mapping of a file or of shared memory, by the file and the place in it."""
    threads: Counter[str]
    """How many threads have each name; Python before 3.14 gives its own no names."""


def footprints(processes: list[psutil.Process]) -> list[Footprint]:
    """Return what each process occupies; those that have ended are left out."""
    found = []
    for process in processes:
        try:
            found.append(_footprint(process))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _footprint(process: psutil.Process) -> Footprint:
    folder = Path(f"/proc/{process.pid}")
    lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(text.split()[0]) << 10 for name, text in (line.split(":", 1) for line in lines)}
    names = Counter[str]()
    for task in (folder / "task").iterdir():
        names[(task / "comm").read_text().strip()] += 1
    return Footprint(_name(process), sizes["Pss"], sizes["Pss_Anon"], _files(folder), names)


def _files(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    place, resident = "", 0
    for line in (folder / "smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # address, rights, offset, device, inode, path
            place = " ".join((rest[2], rest[3], rest[1])) if rest[3] != "0" else ""
        elif first == "Rss:":
            resident = int(rest[0]) << 10
        elif first == "Anonymous:" and place:
            found[place] = found.get(place, 0) + resident - (int(rest[0]) << 10)
    return found


def total_bytes(found: list[Footprint]) -> int:
    """Return what the processes occupy together, with each mapped file once."""
    files: dict[str, int] = {}
    for each in found:
        for place, size in each.files.items():
            files[place] = max(size, files.get(place, 0))
    return sum(each.anonymous for each in found) + sum(files.values())


def _name(process: psutil.Process) -> str:
    words = command_of(process)
    if "--instance-id" in words and (found := _MODULE.fullmatch(words[2])):
        part = words[words.index("--instance-id") + 1]
        return f"{part}'s core" if "." in found[1] else part
    module = next((found[1] for word in words if (found := _MODULE.fullmatch(word))), "")
    return module or "supervisor"


def table(found: list[Footprint]) -> str:
    """Return a row for each process, the largest first, and one for all."""
    lines = [f"{'process':<28}{'PSS MB':>8}{'anonymous':>11}{'threads':>9}  names"]
    for each in sorted(found, key=lambda each: -each.pss):
        names = ", ".join(f"{count} {name}" for name, count in sorted(each.threads.items()))
        sizes = f"{each.pss / 1e6:>8.1f}{each.anonymous / 1e6:>11.1f}"
        lines.append(f"{each.name:<28}{sizes}{each.threads.total():>9}  {names}")
    anonymous, threads = sum(each.anonymous for each in found), sum(each.threads.total() for each in found)
    lines.append(f"{'all':<28}{total_bytes(found) / 1e6:>8.1f}{anonymous / 1e6:>11.1f}{threads:>9}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds without a request before (default 30)")
    parser.add_argument("--asked", action="store_true", help="have a request answered first")
    parser.add_argument("flags", nargs="*", help="of `tokenloom serve`, after --")
    arguments = parser.parse_args()
    with serving() as serve:
        served = serve(*arguments.flags)
        if arguments.asked:
            ask(served)
        threading.Event().wait(arguments.settle)
        found = footprints(served.family())
    print(table(found))
    threads = sum(each.threads.total() for each in found)
    return 0 if arguments.flags or (total_bytes(found) <= MOST_BYTES and threads <= MOST_THREADS) else 1


if __name__ == "__main__":
    sys.exit(main())
