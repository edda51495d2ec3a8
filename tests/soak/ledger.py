"""``python -m tests.soak.ledger``: what each part of a mesh holds before and after many faults of each kind.

Descriptors, threads, shared memory and its mappings of every process, temporary files, and what is on disk: after the
faults of a kind, each is what it was before them. Faults are ends of parts, and what clients leave half done. Of a part
that was killed nothing is compared but what it left: its last process is a new one.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.conftest import Served, command_of

SETTLES_WITHIN = 60.0
"""Seconds until what a fault has left must be gone: connections are closed, leases end, parts reconnect."""
SERVES_WITHIN = 120.0
WARM_UP = 3
"""Faults of a kind before the ledger is opened: they fill caches."""
OPTIONS = (
    *("--worker", "hash", "--prefill", "1", "--decode", "1", "--tokenizers", "2", "--output-processors", "2"),
    *("--drain-timeout", "5"),
)
TRANSPORTS = ("shm", "socket")
"""Ways to read KV blocks; what a reader opened to an owner that was killed differs."""
KILLED = ("engine-0", "engine-1", "tokenizer-0", "output_processor-0", "coordinator-0", "gateway-0")
"""The first engine prefills, the second one decodes."""
TOGETHER = (("engine-1", "tokenizer-0", "output_processor-0"), ("engine-0", "coordinator-0", "gateway-0"))
"""Parts that are lost at the same moment, as those of one host."""
HELPERS = ("render_worker", "compiler_process")
"""The modules of processes that parts start when they need them."""
WORK_ROUNDS = 4
"""So often in succession all parts have worked without a change, so that each has the processes that it needs."""
STEADY_WITHIN = 180.0
"""Seconds until the parts hold the same after each work: engines are asked again some time after they were missed."""
STOPPED_SECONDS = 3.5
"""Longer than peers wait for a sign of life."""
LINE = {
    "custom_id": "1",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tokenloom-demo", "prompt": [7] * 20, "max_tokens": 2000, "ignore_eos": True},
}

_JSON = {"content-type": "application/json"}

Entry = dict[str, int]
"""Numbers by what they count, such as ``engine-0 descriptors``."""


@dataclass
class Ledger:
    """Reads what a mesh holds."""

    mesh: Served
    directory: Path
    """Its temporary and batch files."""

    def read(self) -> Entry:
        """Return what is held now."""
        found: Entry = {}
        for name, pid in self.parts().items():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
                part = psutil.Process(pid)
                for process in (part, *part.children(recursive=True)):
                    self._add(found, name if process == part else f"{name} {_module_of(process)}", process)
        for place in ("tmp", "batches"):
            files = [path for path in (self.directory / place).rglob("*") if path.is_file()]
            found[f"files in {place}"] = len(files)
            found[f"bytes in {place}"] = sum(path.stat().st_size for path in files)
        found["files of the mesh"] = sum(1 for _ in self._of_mesh().rglob("*"))
        return found

    def parts(self) -> dict[str, int]:
        """Return the process ids of the parts that have written a state, by their names."""
        found = {}
        for path in self._of_mesh().glob("*-*.json"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_text())
                found[path.stem] = int(state["pid"])
        return found

    def _of_mesh(self) -> Path:
        return next((self.mesh.log.parent / "tokenloom").glob("mesh-*"))

    @staticmethod
    def _add(found: Entry, name: str, process: psutil.Process) -> None:
        shared = 0
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "/memfd:" in line or "/dev/shm/" in line:
                begin, end = line.split(maxsplit=1)[0].split("-")
                found[f"{name} mappings"] = found.get(f"{name} mappings", 0) + 1
                shared += int(end, 16) - int(begin, 16)
        for what, count in (
            ("processes", 1),
            ("descriptors", process.num_fds()),
            ("threads", process.num_threads()),
            ("shared bytes", shared),
        ):
            found[f"{name} {what}"] = found.get(f"{name} {what}", 0) + count


def _module_of(process: psutil.Process) -> str:
    """Return the last word of the module that a process runs."""
    return next((word.rpartition(".")[2] for word in command_of(process) if word.startswith("tokenloom.")), "?")


def difference(before: Entry, after: Entry) -> dict[str, tuple[int, int]]:
    """Return what changed."""
    names = sorted({*before, *after})
    return {name: (before.get(name, 0), after.get(name, 0)) for name in names if before.get(name) != after.get(name)}


class Faults:
    """Does what goes wrong in a mesh."""

    def __init__(self, mesh: Served, ledger: Ledger, choose: random.Random) -> None:
        self._mesh = mesh
        self._ledger = ledger
        self._choose = choose
        self.kinds: dict[str, Callable[[], None]] = {
            **{_kill_of(names): partial(self._kill, *names) for names in (*((name,) for name in KILLED), *TOGETHER)},
            "kill the core of engine-1": self._kill_core,
            **{_kill_of((helper,)): partial(self._kill_helpers, helper) for helper in HELPERS},
            "stop " + ", ".join(TOGETHER[0]): partial(self._stop, *TOGETHER[0]),
            "a client leaves a stream": self._leave_stream,
            "a client leaves before an answer": self._leave_early,
            "an upload is cut": self._cut_upload,
            "a batch is cancelled": self._cancel_batch,
            "a request is refused": self._refused,
        }

    def work(self) -> None:
        """Let every kind of part do something."""
        with self._client() as http:
            for _ in range(3):
                _until(lambda: http.post("/v1/completions", json=self._body()).status_code == 200, SERVES_WITHIN)
            messages = [{"role": "user", "content": "hello"}]
            schema = {"type": "object", "title": f"of {self._choose.random()}"}  # which no engine has compiled before
            body = {"model": "tokenloom-demo", "messages": messages, "max_tokens": 4}
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            _until(lambda: http.post("/v1/chat/completions", json=body).status_code == 200, SERVES_WITHIN)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._mesh.url, timeout=SERVES_WITHIN, transport=httpx.HTTPTransport(retries=5))

    def _body(self, **fields: Any) -> dict[str, Any]:
        prompt = self._choose.choices(range(3, 300), k=200)
        return {"model": "tokenloom-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}

    def _kill(self, *names: str) -> None:
        parts = self._ledger.parts()
        for name in names:
            os.kill(parts[name], signal.SIGKILL)
        for name in names:
            self._await_successor(name, parts[name])

    def _kill_helpers(self, module: str) -> None:
        """Kill those of all parts, idle or not; the work before has needed some."""
        parts = map(psutil.Process, self._ledger.parts().values())
        helpers = [each for part in parts for each in part.children(recursive=True) if module == _module_of(each)]
        assert helpers, f"no process runs {module}"
        for helper in helpers:
            helper.kill()

    def _stop(self, *names: str) -> None:
        pids = [self._ledger.parts()[name] for name in names]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_SECONDS)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        with self._client() as http:
            _until(lambda: _is_healthy(http), SERVES_WITHIN)

    def _await_successor(self, name: str, pid: int) -> None:
        _until(lambda: self._ledger.parts().get(name, pid) != pid, SERVES_WITHIN)
        with self._client() as http:
            _until(lambda: _is_healthy(http), SERVES_WITHIN)

    def _kill_core(self) -> None:
        pid = self._ledger.parts()["engine-1"]

        def cores() -> list[psutil.Process]:
            return [each for each in psutil.Process(pid).children() if "core_main" in _module_of(each)]

        _until(lambda: bool(cores()), SERVES_WITHIN)  # the mesh is healthy with the other engine, too
        cores()[0].kill()
        self._await_successor("engine-1", pid)

    def _leave_stream(self) -> None:
        body = self._body(max_tokens=1000, stream=True, ignore_eos=True)
        with self._client() as http, http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())

    def _leave_early(self) -> None:
        text = json.dumps(self._body(max_tokens=1000, ignore_eos=True)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(text)}\r\n\r\n"
        with self._connection() as connection:
            connection.sendall(head.encode() + text)

    def _cut_upload(self) -> None:
        head = (
            f"POST /v1/files HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
            "Content-Length: 500000\r\n\r\n--x\r\n"
            'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        )
        with self._connection() as connection:
            connection.sendall(head.encode() + b"y" * 100_000)

    def _cancel_batch(self) -> None:
        with self._client() as http:
            upload = {"file": ("in", json.dumps(LINE))}
            file = http.post("/v1/files", files=upload, data={"purpose": "batch"}).json()["id"]
            fields = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
            batch = http.post("/v1/batches", json=fields).json()["id"]
            path = f"/v1/batches/{batch}"
            _until(lambda: http.get(path).json()["status"] == "in_progress", SERVES_WITHIN)
            http.post(f"{path}/cancel")
            _until(lambda: http.get(path).json()["status"] == "cancelled", SERVES_WITHIN)
            _until(lambda: http.delete(f"/v1/files/{file}").status_code == 200, SERVES_WITHIN)

    def _refused(self) -> None:
        with self._client() as http:
            assert http.post("/v1/completions", json=self._body(max_tokens=-1)).status_code == 400
            assert http.post("/v1/completions", content=b"{", headers=_JSON).status_code == 400

    @property
    def _host(self) -> str:
        return self._mesh.url.partition("://")[2]

    def _connection(self) -> socket.socket:
        host, _, port = self._host.rpartition(":")
        return socket.create_connection((host, int(port)))


def _kill_of(names: Sequence[str]) -> str:
    return "kill " + ", ".join(names)


def _is_replaced(name: str, kind: str, *, has_more: bool) -> bool:
    """Return whether an entry is of what a kind of fault replaces by new processes. More processes than before
    (``has_more``) do not replace those that were killed."""
    if not kind.startswith("kill ") or (has_more and name.endswith(" processes")):
        return False
    killed = kind.removeprefix("kill the core of ").removeprefix("kill ").split(", ")
    return name.partition(" ")[0] in killed or any(f" {module} " in name for module in killed)


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _until(is_so: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s")
        time.sleep(0.1)


@contextlib.contextmanager
def served(transport: str) -> Iterator[tuple[Served, Ledger]]:
    """Run a mesh whose temporary files are in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ledger-", dir="/tmp") as name:
        directory = Path(name)
        for place in ("run", "tmp", "batches"):
            (directory / place).mkdir(mode=0o700)
        options = (*OPTIONS, "--batch-dir", str(directory / "batches"), "--kv-transports", transport)
        mesh = Served(directory / "run", options, {"TMPDIR": str(directory / "tmp")})
        try:
            assert mesh.url, mesh.log.read_text()
            yield mesh, Ledger(mesh, directory)
        finally:
            if mesh.process.poll() is None:
                mesh.stop(signal.SIGINT)


def settled(ledger: Ledger, seconds: float) -> Entry:
    """Return what is held when nothing has changed for so long."""
    entry, since = ledger.read(), time.monotonic()
    end = since + SETTLES_WITHIN
    while time.monotonic() - since < seconds and time.monotonic() < end:
        time.sleep(0.25)
        if (now := ledger.read()) != entry:
            entry, since = now, time.monotonic()
    return entry


def steady(ledger: Ledger, work: Callable[[], object]) -> Entry:
    """Return what is held when work has changed nothing some times in succession."""
    # A decode engine computes prompts itself for a while after its prefill engine was missed. It opens what it needs
    # of that engine's successor only after that, later on a busy machine.
    entry, same, end = settled(ledger, 3.0), 0, time.monotonic() + STEADY_WITHIN
    while same < WORK_ROUNDS and time.monotonic() < end:
        work()
        now = settled(ledger, 1.0)
        entry, same = now, same + 1 if now == entry else 0
    return entry


def compare(ledger: Ledger, before: Entry, kind: str, work: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """Return what differs from before when that has had its time to end, but for what a kind of fault replaces."""

    def differing() -> dict[str, tuple[int, int]]:
        changes = difference(before, ledger.read()).items()
        # The descriptions of batches that have ended stay: a gateway lists them for its clients.
        return {
            name: (was, now)
            for name, (was, now) in changes
            if not (name.endswith("in batches") or _is_replaced(name, kind, has_more=now > was))
        }

    end = time.monotonic() + STEADY_WITHIN
    while (found := differing()) and time.monotonic() < end:
        work()
        time.sleep(0.5)
    return found


def check_batches(directory: Path) -> list[str]:
    """Return the files that no client could delete: all but the descriptions of batches that have ended."""
    kept = re.compile(r"lock|batches/batch_\w+\.json")
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    return [name for name in names if not kept.fullmatch(name)]


def run(
    seed: int, num_faults: int, num_kinds: int, transports: Sequence[str], only: str = "", warm_up: int = WARM_UP
) -> bool:
    """Try kinds of faults. Returns whether no part holds more, or less, behind them than before.

    ``warm_up``: so many of each kind before what is held is read for the first time.
    """
    choose, kept = random.Random(seed), True
    for transport in transports:
        with served(transport) as (mesh, ledger):
            faults = Faults(mesh, ledger, choose)
            kinds = [kind for kind in faults.kinds if only in kind]
            for kind in choose.sample(kinds, min(num_kinds, len(kinds))):
                kept &= _try(kind, faults, ledger, num_faults, transport, warm_up)
            if left := check_batches(ledger.directory / "batches"):
                print(f"{transport}: left in the folder of batches: {left}")
                kept = False
    return kept


def _try(kind: str, faults: Faults, ledger: Ledger, num_faults: int, transport: str, warm_up: int) -> bool:
    for _ in range(warm_up):
        faults.kinds[kind]()
        faults.work()
    # Twice at most: a pool that starts its second thread only now does so once, and what leaks grows again.
    return any(_repeat(kind, faults, ledger, num_faults, transport) for _ in range(2))


def _repeat(kind: str, faults: Faults, ledger: Ledger, num_faults: int, transport: str) -> bool:
    before, began = steady(ledger, faults.work), time.monotonic()
    for _ in range(num_faults):
        faults.kinds[kind]()
        faults.work()
    found = compare(ledger, before, kind, faults.work)
    shown = ", ".join(f"{name} {was} -> {now}" for name, (was, now) in found.items()) or "difference 0"
    print(f"{transport}: {num_faults} times {kind}, {time.monotonic() - began:.0f} s: {shown}", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="of each kind")
    parser.add_argument("--kinds", type=int, default=100, help="how many of them, drawn by the seed; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    arguments = parser.parse_args()
    kept = run(arguments.seed, arguments.faults, arguments.kinds, arguments.transports, arguments.only)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
