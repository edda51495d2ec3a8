"""How soon each part of a mesh notices that another one was killed or stopped.

``python -m tests.e2e.detection`` measures both over unix sockets and over TCP; the times come from the parts' logs.
"""

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

PROMPT = list(range(100, 120))
PORTS = ("coordinator", "tokenizer", "output_processor", "engine", "gateway")
STEP_SECONDS = 0.01


class Link(NamedTuple):
    """A part that notices the death of another, and the line that it logs then."""

    victim: str
    observer: str
    line: str


LINKS = (
    Link("output_processor", "gateway", "output processor "),
    Link("engine", "output_processor", "engine engine-0: "),
    Link("engine", "coordinator", "engine engine-0 left"),
    Link("core", "engine", "failed: "),
    Link("coordinator", "gateway", "coordinator: "),
    Link("coordinator", "output_processor", "stream of picks: "),
    Link("coordinator", "engine", "not in the coordinator's registry"),
    Link("tokenizer", "gateway", "tokenizer "),
)


class Part:
    """A process of the mesh and its log."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.process = psutil.Process(self._process.pid)
        threading.Thread(target=self._read, name=f"log of {name}", daemon=True).start()

    def seen(self, line: str, after: float) -> float | None:
        """Return when a line was logged first after a time."""
        times = [each["time"] for each in list(self.lines) if each["time"] >= after and line in each["message"]]
        return min(times, default=None)

    def stop(self) -> None:
        for process in (*self.process.children(recursive=True), self.process):
            process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith("{"):
                self.lines.append(json.loads(line))


class Mesh:
    """One of each part, over one transport."""

    def __init__(self, directory: Path, transport: str) -> None:
        names = {name: f"{name}-0".replace("_", "-") for name in PORTS}
        unix = {name: f"unix:{directory}/{each}" for name, each in names.items()}
        self._addresses = unix if transport == "unix" else {name: f"127.0.0.1:{free_port()}" for name in PORTS}
        self.url = f"http://127.0.0.1:{free_port()}"
        self._names = names
        self.parts: dict[str, Part] = {}

    def start(self) -> None:
        """Return when a request is answered."""
        coordinator = ("--coordinator", self._addresses["coordinator"])
        flags = {
            "coordinator": (),
            "tokenizer": ("--render-workers", "1"),
            "output_processor": coordinator,
            "engine": (*coordinator, "--worker", "hash", "--hash-step-seconds", str(STEP_SECONDS)),
            "gateway": (
                *(*coordinator, "--http-listen", self.url.removeprefix("http://")),
                *("--tokenizers", self._addresses["tokenizer"]),
                *("--output-processors", self._addresses["output_processor"]),
            ),
        }
        for name, more in flags.items():
            command = [sys.executable, "-m", f"tokenloom.services.{name}", "--instance-id", self._names[name]]
            command += ["--listen", self._addresses[name], "--metrics-listen", "", "--log-format", "json"]
            self.parts[name] = Part(name, [*command, "--log-level", "debug", *more])
        while self.health() != "ok":
            time.sleep(0.1)
        self.ask()

    def health(self) -> str:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                status: str = json.load(answer)["status"]
                return status
        except OSError:
            return "unavailable"

    def ask(self, max_tokens: int = 5) -> None:
        """Have a request answered, or cut off when its part is killed."""
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except OSError:
            pass

    def victim(self, name: str) -> psutil.Process:
        if name != "core":
            return self.parts[name].process
        (core,) = self.parts["engine"].process.children()
        return core

    def stop(self) -> None:
        for part in self.parts.values():
            part.stop()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(transport: str) -> Iterator[Mesh]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp"))
        mesh = Mesh(Path(directory), transport)
        stack.callback(mesh.stop)
        mesh.start()
        yield mesh


def measure(transport: str, victim: str, number: signal.Signals, wait: float) -> dict[Link, float | None]:
    """Kill or stop a part while requests stream, and return after how many seconds each observer noticed."""
    with running(transport) as mesh:
        asking = [threading.Thread(target=mesh.ask, args=(500,), daemon=True) for _ in range(4)]
        for thread in asking:
            thread.start()
        time.sleep(1.0)
        process = mesh.victim(victim)
        at = time.time()
        process.send_signal(number)
        links = [link for link in LINKS if link.victim == victim]
        deadline = at + wait
        found: dict[Link, float | None] = {}
        while len(found) < len(links) and time.time() < deadline:
            time.sleep(0.05)
            for link in links:
                if link not in found and (seen := mesh.parts[link.observer].seen(link.line, at)) is not None:
                    found[link] = seen - at
        return {link: found.get(link) for link in links}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--transport", choices=("unix", "tcp"), nargs="*", default=("unix", "tcp"))
    parser.add_argument("--victim", nargs="*", default=list(dict.fromkeys(link.victim for link in LINKS)))
    arguments = parser.parse_args()
    print("| transport | signal | part | noticed by | median s | longest s |\n|---|---|---|---|---|---|")
    for transport in arguments.transport:
        for number, wait in ((signal.SIGKILL, 5.0), (signal.SIGSTOP, 15.0)):
            for victim in arguments.victim:
                runs = [measure(transport, victim, number, wait) for _ in range(arguments.times)]
                for link in runs[0]:
                    times = [run[link] for run in runs]
                    known = [each for each in times if each is not None]
                    shown = f"{statistics.median(known):.3f} | {max(known):.3f}" if known else "never | never"
                    lost = f" ({len(times) - len(known)} never)" if len(known) < len(times) else ""
                    print(f"| {transport} | {number.name} | {victim} | {link.observer} | {shown}{lost} |", flush=True)


if __name__ == "__main__":
    main()
