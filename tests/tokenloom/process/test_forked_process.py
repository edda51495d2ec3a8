"""A forked part differs in nothing from one that was started anew."""

import asyncio
import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokenloom.process import forked_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")

PART = """
import json, os, random, signal, sys, tempfile, threading, time

print(json.dumps({
    "arguments": sys.argv[1:],
    "main": __name__,
    "environment": dict(os.environ),
    "group": os.getpgid(0) == os.getpid(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "command": open("/proc/self/cmdline").read(),
    "name": open("/proc/self/comm").read().strip(),
    "stdin": sys.stdin.read(),
    "random": random.random(),
    "temporary": tempfile.gettempdir(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}))
behaviour = sys.argv[1]
if behaviour == "exit":
    threading.Thread(target=lambda: (time.sleep(0.1), print("a thread ends"))).start()
    sys.exit(int(sys.argv[2]))
if behaviour == "executor":
    from concurrent.futures import ThreadPoolExecutor
    ThreadPoolExecutor(1).submit(print, "work is done").result()
    sys.exit(2)
if behaviour == "stuck":
    from tokenloom.process import forked_process
    forked_process._END_SECONDS = 0.01
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(2)
if behaviour == "fail":
    raise LookupError("a failure")
if behaviour == "wait":
    signal.pause()
"""

SUPERVISOR = """
import asyncio, atexit, json, os, random, socket, sys, tempfile
from pathlib import Path
from tokenloom.supervisor.process import fork_first
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier
from tokenloom.supervisor.part_spec import PartSpec

def write(name, line):
    print(name, line, flush=True)

atexit.register(print, "the supervisor's exit handler", flush=True)
directory = tempfile.TemporaryDirectory()
held, other = socket.socket(), socket.socket()
random.seed(1)
behaviours = json.loads(sys.argv[1])
specs = [
    PartSpec("part", index, (sys.executable, "-m", "a_part", *behaviour, *map(str, (held.fileno(), "x" * 3000))),
             Path(directory.name) / f"state-{index}", environment={"MINE": str(index), "TMPDIR": directory.name},
             withheld=frozenset({"SECRET"}), descriptors=(held.fileno(),))
    for index, behaviour in enumerate(behaviours)
]
output = LineCopier(write)
processes, _ = fork_first(specs, output)
print("pids", *(process.pid for process in processes.values()), flush=True)

async def wait():
    for name, process in processes.items():
        print("status", name, await process.wait(), await process.wait(), flush=True)

asyncio.run(wait())
output.close()
print("directory", Path(directory.name).exists(), flush=True)
"""


def start(tmp_path: Path, *behaviours: tuple[str, ...]) -> "subprocess.Popen[str]":
    (tmp_path / "a_part.py").write_text(PART)
    environment = {"PYTHONPATH": str(tmp_path), "SECRET": "the supervisor's", "OTHER": "kept"}
    command = [sys.executable, "-c", SUPERVISOR, json.dumps(behaviours)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextlib.contextmanager
def waiting(tmp_path: Path) -> "Iterator[tuple[subprocess.Popen[str], psutil.Process]]":
    """Yield a supervisor and its part, which waits; both end, also where a test fails: the part with the supervisor."""
    with start(tmp_path, ("wait",)) as run:
        try:
            assert run.stdout is not None
            lines = sorted(run.stdout.readline() for _ in range(2))  # the part may write before its id is written
            assert lines[0].startswith("part-0 {")
            yield run, psutil.Process(int(lines[1].removeprefix("pids ")))
        finally:
            run.kill()


def lines_of(run: "subprocess.Popen[str]") -> list[str]:
    lines = run.communicate()[0].splitlines()
    for line in lines:  # shown where a test failed
        print(line[:300])
    return lines


def seen_by(lines: list[str], index: int) -> dict[str, Any]:
    start = f"part-{index} {{"
    seen: dict[str, Any] = json.loads(next(line for line in lines if line.startswith(start))[len(start) - 1 :])
    return seen


def test_a_forked_part_finds_what_a_started_one_does(tmp_path: Path) -> None:
    lines = lines_of(start(tmp_path, ("exit", "0"), ("exit", "3")))
    parts = [seen_by(lines, index) for index in range(2)]
    for index, part in enumerate(parts):
        assert part["main"] == "__main__"
        assert part["arguments"][:2] == ["exit", "0" if index == 0 else "3"]
        assert part["environment"]["MINE"] == str(index)
        assert part["environment"]["OTHER"] == "kept"
        assert "SECRET" not in part["environment"]
        assert part["group"]
        assert part["descriptors"] == [0, 1, 2, int(part["arguments"][2])]
        words = [sys.executable, "-m", "a_part", *part["arguments"]]
        assert part["command"] == "".join(f"{word}\0" for word in words), "each argument by itself, none cut"
        assert part["name"] == Path(sys.executable).name
        assert part["stdin"] == ""
        assert part["temporary"] == part["environment"]["TMPDIR"], "not the supervisor's"
        assert part["blocked"] == sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    assert parts[0]["random"] != parts[1]["random"]
    assert "status part-0 0 0" in lines
    assert "status part-1 3 3" in lines


def test_a_part_ends_after_its_threads_and_without_the_supervisors_exit_handlers(tmp_path: Path) -> None:
    lines = lines_of(start(tmp_path, ("exit", "0"), ("fail",)))
    assert "part-0 a thread ends" in lines
    assert "part-1 LookupError: a failure" in lines
    assert "status part-1 1 1" in lines
    assert "directory True" in lines
    assert [line for line in lines if "exit handler" in line] == ["the supervisor's exit handler"]


def test_a_part_ends_whose_threads_nothing_ends(tmp_path: Path) -> None:
    """A gateway that failed at its start left its executor's threads, and the supervisor waited for it for ever."""
    lines = lines_of(start(tmp_path, ("executor",), ("stuck",)))
    assert "part-0 work is done" in lines
    assert "status part-0 2 2" in lines
    assert "status part-1 2 2" in lines


def test_a_killed_part_has_its_signal_as_status(tmp_path: Path) -> None:
    with waiting(tmp_path) as (run, part):
        part.kill()
        assert f"status part-0 -{int(signal.SIGKILL)} -{int(signal.SIGKILL)}" in lines_of(run)


def test_a_part_is_killed_with_the_supervisor(tmp_path: Path) -> None:
    with waiting(tmp_path) as (_, child):
        pass
    assert psutil.wait_procs([child], timeout=60)[1] == [] or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_with_threads_is_not_forked() -> None:
    code = (
        "import threading; from tokenloom.process.forked_process import can_fork; before = can_fork(); "
        "end = threading.Event(); thread = threading.Thread(target=end.wait); thread.start(); "
        "print(before, can_fork()); end.set()"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["True", "False"]


def test_grpc_that_watches_for_forks_prevents_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "1")
    assert not forked_process.can_fork()


def test_what_parts_share_is_imported_without_a_thread() -> None:
    code = (
        "import tokenloom.cli.serve.serving, tokenloom.services.runtime.host.service; "
        "from tokenloom.process.forked_process import can_fork; print(can_fork())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


async def test_the_end_is_seen_without_a_free_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", scarce)
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(7)"], os.environ)  # noqa: ASYNC221 - a moment
    async with asyncio.timeout(60):
        assert await forked_process.ForkedProcess(pid).wait() == 7


def test_where_the_kernel_takes_no_other_memory_the_first_command_is_written_over() -> None:
    code = (
        "import os, sys; os.environ = dict(os.environ); from tokenloom.process import forked_process; "
        "forked_process._PR_SET_MM = -1; forked_process.show_command_line(['python', '-m', 'a_part', 'x' * 100_000]); "
        "sys.stdout.write(open('/proc/self/cmdline').read())"
    )
    shown = subprocess.check_output([sys.executable, "-c", code, "y" * 100], text=True).rstrip("\0")
    assert shown.startswith("python -m a_part xxx")
    assert 100 < len(shown) < 100_000
