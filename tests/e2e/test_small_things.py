"""Small things that a machine does to a mesh, and that no mesh ends of."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DETACHED = ("bash", "-c", 'trap "" HUP; exec 2> >(read -r line); exec "$@"', "bash")
"""Runs a command as ``nohup`` does, whose log loses its reader after the first line."""


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Iterator[Any]:
    mesh = serve(wrapper=DETACHED)
    yield mesh
    assert mesh.stop(signal.SIGTERM) == 0, "a decision ends it in order"


def ask(url: str) -> int:
    body = {"model": "tokenloom-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)


def replaced(mesh: Any, service: str, number: int, wait: Any) -> None:
    """Kill a part and wait until the supervisor has started it anew."""
    killed = mesh.part(service)
    killed.send_signal(number)
    psutil.wait_procs([killed], 30)
    wait(lambda: any(row["service"] == service and row["health"] == "SERVING" for row in mesh.ps()))
    assert mesh.part(service).pid != killed.pid


@pytest.fixture
def wait() -> Any:
    def until(holds: Any) -> None:
        while not holds():  # pytest's timeout bounds it
            pass

    return until


def test_a_part_comes_back_though_the_log_has_no_reader(mesh: Any, wait: Any) -> None:
    replaced(mesh, "tokenizer", signal.SIGKILL, wait)
    assert ask(mesh.url) == 200


def test_a_part_comes_back_after_a_signal_without_a_name(mesh: Any, wait: Any) -> None:
    replaced(mesh, "output_processor", signal.SIGRTMIN + 1, wait)
    assert ask(mesh.url) == 200


def test_a_hangup_that_is_ignored_ends_nothing(mesh: Any) -> None:
    os.kill(mesh.process.pid, signal.SIGHUP)
    assert ask(mesh.url) == 200
    assert mesh.process.poll() is None


def test_the_next_mesh_leaves_one_alone_whose_lock_file_is_gone(mesh: Any, serve: Any, wait: Any) -> None:
    runtime = Path(mesh.environment["XDG_RUNTIME_DIR"])
    (lock,) = (runtime / "tokenloom").glob("mesh-*/lock")
    lock.unlink()
    other = serve("--worker", "hash", XDG_RUNTIME_DIR=str(runtime))
    assert other.stop(signal.SIGTERM) == 0
    assert {row["health"] for row in mesh.ps()} == {"SERVING"}
    assert ask(mesh.url) == 200
