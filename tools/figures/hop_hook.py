"""Records the Python calls of a process. Each process of a measured mesh imports this file as its ``sitecustomize``.

The mesh is started with ``PYTHONPATH`` set to a folder that holds a copy of this file, and with ``HOUSE_HOPS`` set to
the folder where the tool and the processes meet:

- a process that has started writes ``PID.ready``;
- once ``on`` is there, every process records its calls and writes ``PID.on``;
- once ``dump`` is there, every process writes ``PID.json``: its command line, and each call with its time.

The file imports only the standard library, because it runs before the program does.
"""

import json
import os
import sys
import threading
import time
from dis import opmap
from pathlib import Path
from types import CodeType, FrameType

_POLL_SECONDS = 0.02
_MOST_CALLS = 2_000_000
"""Calls that a process records at most, so that a forgotten mesh does not fill the memory."""
_GENERATORS = 0x20 | 0x80 | 0x200
"""Code flags of generators, coroutines and asynchronous generators: functions whose calls may pause and resume."""


class Recorder:
    """Keeps the calls of functions whose files lie under given folders, from :meth:`switch_on` until the end.

    Times are those of CLOCK_MONOTONIC in nanoseconds, which all processes of a machine share.
    """

    def __init__(self, folders: tuple[str, ...]) -> None:
        self._folders = folders
        self._calls: list[tuple[int, CodeType, int]] = []
        self._is_on = False

    def switch_on(self) -> None:
        self._is_on = True

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        """Serve as a profile function: the interpreter calls it in the thread that makes the call."""
        if event != "call" or not self._is_on:
            return
        code = frame.f_code
        if code.co_filename.startswith(self._folders) and len(self._calls) < _MOST_CALLS:
            self._calls.append((time.monotonic_ns(), code, frame.f_lasti))

    def dump(self) -> dict[str, object]:
        """Return the functions, and the calls as ``[time, index of the function, whether it resumed]``."""
        functions: dict[int, tuple[int, CodeType]] = {}
        calls = []
        for moment, code, instruction in list(self._calls):
            index, _ = functions.setdefault(id(code), (len(functions), code))
            calls.append([moment, index, _is_resumed(code, instruction)])
        return {
            "python": sys.version.split()[0],
            "command": sys.orig_argv,
            "functions": [[code.co_filename, code.co_qualname, code.co_firstlineno] for _, code in functions.values()],
            "calls": calls,
        }


def _is_resumed(code: CodeType, instruction: int) -> bool:
    """Return whether a paused generator or coroutine continued there; the interpreter reports that as a call too."""
    if not code.co_flags & _GENERATORS or instruction < 0:
        return False
    bytecode = code.co_code
    return bytecode[instruction] == opmap["RESUME"] and bytecode[instruction + 1] & 3 != 0


def _serve(folder: Path, recorder: Recorder) -> None:
    """Follow the tool's files in ``folder`` until the calls are written."""
    pid = os.getpid()
    (folder / f"{pid}.ready").touch()
    _wait_for(folder / "on")
    recorder.switch_on()
    (folder / f"{pid}.on").touch()
    _wait_for(folder / "dump")
    part = folder / f"{pid}.part"
    part.write_text(json.dumps(recorder.dump()))
    part.rename(folder / f"{pid}.json")


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(_POLL_SECONDS)


def install(folder: str, tree: str) -> None:
    """Hook the main thread and all threads that start later; the thread that follows the tool's files has no hook."""
    recorder = Recorder(tuple({os.path.join(each, "") for each in (tree, os.path.realpath(tree))}))
    threading.Thread(target=_serve, args=(Path(folder), recorder), daemon=True).start()
    threading.setprofile(recorder.hook)
    sys.setprofile(recorder.hook)


if __name__ == "sitecustomize":
    install(os.environ["HOUSE_HOPS"], os.environ["HOUSE_TREE"])
