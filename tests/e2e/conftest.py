"""A mesh as a user starts it: the command, its processes, its URL."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = (sys.executable, "-m", "tokenloom.cli.main")


class Served:
    """A running ``tokenloom serve`` with a state directory of its own."""

    def __init__(
        self, directory: Path, arguments: tuple[str, ...], environment: dict[str, str], wrapper: tuple[str, ...] = ()
    ) -> None:
        """``wrapper``: a command that ends by running the command after it, for example with lower limits."""
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory), **environment}
        self.log = directory / "log"
        self._directory = directory
        with open(self.log, "wb") as log:
            command = (*wrapper, *COMMAND, "serve", "--port", "0", *arguments)
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=self.environment, text=True
            )
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()  # pytest's timeout bounds the wait
        self.url = next(iter(re.findall(r"https?://[\w.:]+", self.ready_line)), "")

    def ps(self) -> list[dict[str, Any]]:
        """``tokenloom ps --json``."""
        command = (*COMMAND, "ps", "--json")
        done = subprocess.run(command, stdout=subprocess.PIPE, env=self.environment, check=False)
        parts: list[dict[str, Any]] = json.loads(done.stdout)
        return parts

    def part(self, service: str) -> psutil.Process:
        """The part's process now, from the supervisor's children; raises ``StopIteration`` when there is none."""
        wanted = f"tokenloom.services.{service}"
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if wanted in command_of(child))

    def family(self) -> list[psutil.Process]:
        """Every process of the mesh: the supervisor's descendants, and whatever names its directory."""
        found = {self.process.pid: psutil.Process(self.process.pid)}
        found |= {child.pid: child for child in found[self.process.pid].children(recursive=True)}
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self._directory) in argument for argument in process.info["cmdline"] or ()):
                found[process.pid] = process
        return list(found.values())

    def stop(self, number: signal.Signals) -> int:
        """Sends a signal to the supervisor and waits for its end; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def command_of(process: psutil.Process) -> list[str]:
    """Return a process's command; empty if it has ended since it was listed."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


Serve = Callable[..., Served]


@contextmanager
def serving() -> Iterator[Serve]:
    """Starts meshes; what is still running at the end is killed."""
    started: list[tuple[Served, Path]] = []

    def start(*arguments: str, wrapper: tuple[str, ...] = (), **environment: str) -> Served:
        directory = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
        served = Served(directory, arguments, environment, wrapper)
        started.append((served, directory))
        assert served.url, f"it did not come up:\n{served.log.read_text()}"
        return served

    try:
        yield start
    finally:
        for served, directory in started:
            if served.process.poll() is None:
                served.stop(signal.SIGKILL)
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    """Starts meshes for one module."""
    with serving() as start:
        yield start


@pytest.fixture(scope="session")
def default_mesh() -> Iterator[Callable[[], Served]]:
    """Returns the mesh without options that modules share; starts it if none runs."""
    with serving() as start:
        served: list[Served] = []

        def running() -> Served:
            if not served or served[-1].process.poll() is not None:
                served.append(start())
            return served[-1]

        yield running


def still_alive(processes: list[psutil.Process], timeout: float = 30.0) -> list[psutil.Process]:
    """Those that have not ended after `timeout` seconds; zombies have."""
    _, alive = psutil.wait_procs(processes, timeout)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def remaining() -> Callable[[list[psutil.Process]], list[psutil.Process]]:
    return still_alive
