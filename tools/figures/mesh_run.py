"""Runs a local mesh under the recording hook, sends it chat requests and collects what its processes recorded."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 180.0
_END_SECONDS = 60.0
_IDLE_SECONDS = 0.7
"""Pause before each request, so that nothing of the request before it is still running."""
_POLL_SECONDS = 0.05
_WARM_UPS = 2
_MAX_TOKENS = 4
_HOOK = Path(__file__).with_name("hop_hook.py")
_SERVE = "from tokenloom.cli.main import main; main()"
_LOG = "log"
_LOG_LINES = 15


class MeshRunError(Exception):
    """Raised when the mesh cannot be measured; the message says why."""


@dataclass(frozen=True)
class Recording:
    """Holds what one run of the mesh left."""

    sent: list[int]
    """When each request was sent, in nanoseconds of CLOCK_MONOTONIC; warm-up requests are left out."""
    dumps: list[dict[str, Any]]
    """What each process of the mesh wrote, without the supervisor."""


def record(root: Path, requests: int) -> Recording:
    """Start the mesh of the checkout ``root`` with its own environment, send ``requests`` chats and stop the mesh.

    Raises ``MeshRunError`` when the checkout has no environment, when the mesh does not start or a request fails.
    """
    python = root / ".venv" / "bin" / "python"
    if not python.exists():
        raise MeshRunError(f"{python} does not exist; run `make install` in that checkout first")
    folder = Path(tempfile.mkdtemp(prefix="house-"))
    try:
        with _mesh(python, root, folder) as (supervisor, check):
            port = _await_port(folder, check)
            model = _await_answers(port, check)
            pids = _rendezvous(folder, "on", ".on", check)
            sent = [_chat(port, model, f"Request {index}: what is prefill?") for index in range(requests)]
            _rendezvous(folder, "dump", ".json", check)
        dumps = [json.loads((folder / f"{pid}.json").read_text()) for pid in pids if pid != supervisor]
        return Recording(sent, dumps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _mesh(python: Path, root: Path, folder: Path) -> Iterator[tuple[int, Callable[[], None]]]:
    """Keep a mesh running. Gives the supervisor's process id and a function that raises once the mesh has ended."""
    hook = folder / "hook"
    hook.mkdir()
    shutil.copy(_HOOK, hook / "sitecustomize.py")
    log = folder / _LOG
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-c", _SERVE, "serve", "--port", "0"],
            cwd=root,
            env=_environment(hook, folder, root),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def check() -> None:
        if process.poll() is not None:
            raise MeshRunError("the mesh ended early; its last lines:\n" + _last_lines(log))

    try:
        yield process.pid, check
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment(hook: Path, folder: Path, root: Path) -> Mapping[str, str]:
    """Return this process's environment with the hook added. PYTHONPATH names only the hook's folder."""
    added = {"PYTHONPATH": str(hook), "HOUSE_HOPS": str(folder), "HOUSE_TREE": str(root), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **added}


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _await_port(folder: Path, check: Callable[[], None]) -> int:
    """Wait until the mesh prints its address, and return its HTTP port. The mesh chose a free one."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        check()
        if found := re.search(r" at http://[\d.]+:(\d+) ", (folder / _LOG).read_text(errors="replace")):
            return int(found[1])
        time.sleep(_POLL_SECONDS)
    raise MeshRunError(f"the mesh printed no address within {_START_SECONDS:.0f} seconds")


def _await_answers(port: int, check: Callable[[], None]) -> str:
    """Wait until the mesh has answered the warm-up chats, and return the model's name."""
    deadline = time.monotonic() + _START_SECONDS
    answered, problem = 0, "no request was answered"
    while time.monotonic() < deadline:
        check()
        try:
            model = _model(port)
            _chat(port, model, f"Warm-up {answered}: what is decode?")
            answered += 1
            if answered == _WARM_UPS:
                return model
        except (OSError, MeshRunError) as error:  # the gateway does not listen yet, or no engine serves yet
            problem = str(error)
            time.sleep(_POLL_SECONDS)
    raise MeshRunError(f"the mesh was not ready after {_START_SECONDS:.0f} seconds: {problem}")


def _model(port: int) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    if response.status != 200 or not (models := json.loads(body)["data"]):
        raise MeshRunError(f"the gateway lists no model yet: {body[:500]}")
    return str(models[0]["id"])


def _chat(port: int, model: str, question: str) -> int:
    """Stream one chat to its end over a connection that is already open. Returns when the request was sent."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps(
        {"model": model, "messages": messages, "stream": True, "max_tokens": _MAX_TOKENS, "temperature": 0}
    )
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        time.sleep(_IDLE_SECONDS)
        sent = time.monotonic_ns()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read().decode(errors="replace")
    if response.status != 200 or "[DONE]" not in answer:
        raise MeshRunError(f"the gateway answered {response.status}: {answer[:500]}")
    return sent


def _rendezvous(folder: Path, order: str, suffix: str, check: Callable[[], None]) -> list[int]:
    """Give an order to all processes, wait until each process that is alive has followed it, and return their ids."""
    (folder / order).touch()
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        check()
        pids = [pid for path in folder.glob("*.ready") if _is_alive(pid := int(path.stem))]
        if all((folder / f"{pid}{suffix}").exists() for pid in pids):
            return pids
        time.sleep(_POLL_SECONDS)
    raise MeshRunError(f"not every process followed the order {order!r} within {_END_SECONDS:.0f} seconds")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
