"""A standby's forks are children of the supervisor, have what it has imported, and begin only when they may.

Each test runs a program of its own, because a process with threads, as that of the tests, has no standby.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux's processes are forked")

SLOW_IMPORT = """
import os
with open(os.environ["IMPORTS"], "a") as file:
    file.write("x")
"""
PART = """
import json, os, sys
import slow_import
from tokenloom.process.standby import take_waiting_child

child = take_waiting_child()
print(json.dumps({
    "arguments": sys.argv[1:],
    "pid": os.getpid(),
    "parent": os.getppid(),
    "group": os.getpgid(0) == os.getpid(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "command": open("/proc/self/cmdline").read(),
    "environment": dict(os.environ),
    "child": child is not None and child.pid,
}), flush=True)
if sys.argv[1] == "child":
    read_end, write_end = os.pipe()
    child.run([sys.executable, "-m", "a_child", str(write_end)], [write_end])
    os.close(write_end)
    print(os.read(read_end, 65536).decode(), flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
    print(json.dumps([child.poll(), child.terminate(), child.wait(60), child.poll()]), flush=True)
if sys.argv[1] == "killed":
    child.kill()
    child.wait(60)
    try:
        child.run([sys.executable, "-m", "a_child", "1"], [])
    except OSError:
        print("gone", flush=True)
sys.exit(5)
"""
CHILD = """
import json, os, sys
import slow_import
print("the child prints", flush=True)
os.write(int(sys.argv[1]), json.dumps({
    "pid": os.getpid(),
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "command": open("/proc/self/cmdline").read(),
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
}).encode())
os.close(int(sys.argv[1]))
os.read(0, 1)
print("the parent has ended", flush=True)
"""
SUPERVISOR = """
import json, os, socket, sys
from tokenloom.process.standby import NUMBER, READY, fork_standby, send_request, taking_orphans

standby, connection = fork_standby(json.loads(sys.argv[1]), 1)
answer = connection.recv(NUMBER.size)
print("ready" if answer == NUMBER.pack(READY) else answer, standby, flush=True)
held, kept = socket.socket(), 200
numbers = {kept: held.fileno(), held.fileno(): os.dup(held.fileno())}

def start(words, says_so=True, **options):
    go, gone = os.pipe()
    with taking_orphans():
        command, environment = (sys.executable, "-m", "a_part", *words), dict(os.environ) | {"OWN": "\\udc80"}
        send_request(connection, command, environment, {0: go, 1: 1} | numbers, **options)
        pid, = NUMBER.unpack(connection.recv(NUMBER.size))
    os.close(go)
    print("started", pid, flush=True)
    if says_so:
        os.write(gone, b"x")
    os.close(gone)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

for words, options in json.loads(sys.argv[2]):
    start(words, **options)
if "wait" in sys.argv:
    sys.stdin.read()
"""


def start(tmp_path: Path, *parts: Any, modules: tuple[str, ...] = ("slow_import",), wait: bool = False) -> Any:
    for name, text in (("slow_import", SLOW_IMPORT), ("a_part", PART), ("a_child", CHILD)):
        (tmp_path / f"{name}.py").write_text(text)
    environment = {"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports")}
    command = [sys.executable, "-c", SUPERVISOR, json.dumps(modules), json.dumps(parts), *(("wait",) if wait else ())]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def lines_of(run: "subprocess.Popen[str]") -> list[str]:
    lines = run.communicate()[0].splitlines()
    for line in lines:  # shown where a test failed
        print(line[:300])
    return lines


def seen_by(lines: list[str]) -> list[Any]:
    return [json.loads(line) for line in lines if line.startswith(("{", "["))]


def test_a_fork_of_a_standby_finds_what_a_started_part_does(tmp_path: Path) -> None:
    run = start(tmp_path, (("one", "x" * 3000), {}), (("two",), {}))
    lines = lines_of(run)
    one, two = seen_by(lines)
    for part, words in ((one, ["one", "x" * 3000]), (two, ["two"])):
        assert part["parent"] == run.pid, "a child of the supervisor, not of the standby"
        assert part["group"]
        assert part["arguments"] == words
        assert part["command"] == "".join(f"{word}\0" for word in (sys.executable, "-m", "a_part", *words))
        assert part["descriptors"][:3] == [0, 1, 2]
        assert len(part["descriptors"]) == 5, "the two that it is to keep, one under another number"
        assert part["descriptors"][-1] == 200
        assert part["environment"]["OWN"] == "\udc80"
        assert part["child"] is False
    assert lines.count("ended 5") == 2
    assert (tmp_path / "imports").read_text() == "x", "imported once, by the standby"


def test_a_waiting_child_becomes_its_command_and_ends_when_it_is_told(tmp_path: Path) -> None:
    lines = lines_of(start(tmp_path, (("child", "end"), {"has_child": True})))
    part, child, ends = seen_by(lines)
    assert child["pid"] == part["child"]
    assert child["parent"] == part["pid"]
    assert child["session"]
    assert child["command"].startswith(f"{sys.executable}\0-m\0a_child\0")
    assert len(child["descriptors"]) == 4, "the one that it is given"
    assert ends == [None, None, -signal.SIGTERM, -signal.SIGTERM]
    assert "the child prints" in lines
    assert (tmp_path / "imports").read_text() == "x", "imported once for all three"


def test_a_waiting_child_that_has_its_command_sees_the_end_of_its_parent(tmp_path: Path) -> None:
    lines = lines_of(start(tmp_path, (("child", "die"), {"has_child": True})))
    assert "ended -9" in lines
    assert "the parent has ended" in lines


def test_a_waiting_child_without_a_command_ends_with_its_parent(tmp_path: Path) -> None:
    run = start(tmp_path, (("other",), {"has_child": True}))
    child = seen_by(lines_of(run))[0]["child"]  # which holds the output of all of them, as long as it lives
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_waiting_child_that_was_killed_takes_no_command(tmp_path: Path) -> None:
    assert "gone" in lines_of(start(tmp_path, (("killed",), {"has_child": True})))


def test_a_part_that_the_supervisor_gives_up_never_begins(tmp_path: Path) -> None:
    lines = lines_of(start(tmp_path, (("one",), {"says_so": False}), (("two",), {})))
    assert [part["arguments"] for part in seen_by(lines)] == [["two"]]
    assert [line for line in lines if line.startswith("ended")] == ["ended 0", "ended 5"]


def test_a_standby_ends_with_the_supervisor(tmp_path: Path) -> None:
    run = start(tmp_path, wait=True)
    assert run.stdout is not None
    standby = psutil.Process(int(run.stdout.readline().split()[1]))
    assert standby.cmdline()[-1] == "tokenloom.process.standby"
    assert standby.num_threads() == 1
    assert os.getpgid(standby.pid) == standby.pid
    run.kill()
    run.communicate()
    assert psutil.wait_procs([standby], timeout=60)[1] == [] or standby.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("module", ["no_such_module", "threaded"])
def test_a_standby_that_cannot_import_or_has_a_thread_says_why_and_ends(module: str, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()\n")
    lines = lines_of(start(tmp_path, modules=(module,)))
    assert any(line.startswith("b''") for line in lines), "the end of its socket"
    assert any(module in line and ("ModuleNotFoundError" in line or "thread" in line) for line in lines)


INTERRUPTED = """
import os, signal
from tokenloom.process.standby import fork_standby

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
fork, supervisor = os.fork, os.getpid()
def interrupted():
    if not (pid := fork()):
        os.kill(os.getpid(), signal.SIGINT)
    return pid
os.fork = interrupted
try:
    print("answer", fork_standby((), 1)[1].recv(8), flush=True)
finally:
    print("back in", "the supervisor" if os.getpid() == supervisor else "the standby", flush=True)
"""


def test_an_interrupt_right_behind_the_fork_ends_the_standby_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["answer b''", "back in the supervisor"]
    assert "back in the standby" not in done.stdout


UNREAD = """
import os, select
from tokenloom.process.standby import fork_standby

pid, requests = fork_standby((), 2)
select.select((requests,), (), ())
requests.close()
print("status", os.waitpid(pid, 0)[1], flush=True)
"""


def test_a_standby_ends_quietly_whose_answer_was_not_read() -> None:
    """As that of a mesh that ends before a part has come back."""
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("status 0\n", "")
