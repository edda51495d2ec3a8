"""Runs the processes of ``bench scale``: each one prints what it has counted whenever it reads a line."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import psutil

REMOTE_POLICY = os.SCHED_IDLE
"""How processes that stand for other machines are scheduled: they get processor time only when the coordinator needs
none. A low priority is not enough: Linux lets such a process run for some milliseconds before one with a higher
priority that has work again."""


class Child:
    """A process of a module of this package. To be used in a ``with`` block, which ends it."""

    def __init__(self, module: str, *arguments: object, is_remote: bool = True) -> None:
        """``module``: its name in this package. ``is_remote``: whether it stands for parts on other machines."""
        command = (sys.executable, "-m", f"{__package__}.{module}", *map(str, arguments))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if is_remote:
            os.sched_setscheduler(self._process.pid, REMOTE_POLICY, os.sched_param(0))
        self._times = psutil.Process(self._process.pid).cpu_times

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has used."""
        times = self._times()
        return float(times.user + times.system)

    def counts(self, order: str = "") -> dict[str, float]:
        """Return what it has counted, after an order that the module knows. Raises ``OSError`` if it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise OSError(f"{self._process.args!r} ended")
        return {name: float(value) for name, value in json.loads(line).items()}


def answer(counts: Callable[[str], Mapping[str, float]]) -> None:
    """Answer :meth:`Child.counts` from now on, from a thread. ``counts`` gets the order."""

    def read() -> None:
        for line in sys.stdin:
            print(json.dumps(counts(line.strip())), flush=True)

    threading.Thread(target=read, daemon=True).start()
