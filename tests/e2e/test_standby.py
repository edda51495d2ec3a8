"""Parts that are killed come back as forks of standbys, which have imported what the parts need."""

import signal
import subprocess
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import COMMAND, command_of

SERVES_WITHIN = 120.0
BODY = {"model": "tokenloom-demo", "prompt": [7] * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Any:
    return serve("--standby", "--num-threads", "1")


def answer(mesh: Any) -> str:
    """Returns the text of the same request each time; it waits for the part that is missing."""
    ends = time.monotonic() + SERVES_WITHIN
    while True:
        try:
            response = httpx.post(f"{mesh.url}/v1/completions", json=BODY, timeout=SERVES_WITHIN)
            if response.status_code == 200:
                text: str = response.json()["choices"][0]["text"]
                return text
        except httpx.TransportError:
            response = None
        assert time.monotonic() < ends, (response, mesh.log.read_text())


def maps_torch(process: psutil.Process) -> bool:
    return any("libtorch_cpu" in mapped.path for mapped in process.memory_maps())


def standbys(mesh: Any) -> list[psutil.Process]:
    children = psutil.Process(mesh.process.pid).children()
    return [child for child in children if command_of(child)[-1:] == ["tokenloom.process.standby"]]


@pytest.mark.parametrize("service", ["engine", "tokenizer", "output_processor", "coordinator", "gateway"])
def test_a_part_that_is_killed_is_forked_anew(mesh: Any, service: str) -> None:
    expected, before = answer(mesh), {process.pid for process in standbys(mesh)}
    old = mesh.part(service)
    written = mesh.log.stat().st_size
    old.send_signal(signal.SIGKILL)
    assert answer(mesh) == expected
    deadline = time.monotonic() + SERVES_WITHIN
    while not any(part["service"] == service and part["health"] == "SERVING" for part in mesh.ps()):
        assert time.monotonic() < deadline, mesh.log.read_text()
    new = mesh.part(service)
    assert new.pid != old.pid
    assert new.ppid() == mesh.process.pid
    assert len(before) == 2
    assert {process.pid for process in standbys(mesh)} == before, "both live, and both are of use again"
    assert maps_torch(new) == (service == "engine"), "a front has no use for it: it has come with the fork"
    if service == "engine":
        assert "the remembered time and memory of a prefill step" in mesh.log.read_text()[written:]
        assert [child for child in new.children() if "tokenloom.services.engine.core.core_main" in command_of(child)]
    assert "started anew" not in mesh.log.read_text()


def test_a_standby_that_is_killed_costs_the_next_part_its_imports(mesh: Any) -> None:
    expected = answer(mesh)
    for process in standbys(mesh):
        process.kill()
    for service in ("engine", "coordinator"):
        mesh.part(service).send_signal(signal.SIGKILL)
        assert answer(mesh) == expected
    assert not maps_torch(mesh.part("engine"))
    assert "standby-1          | it has ended; processes of engine are started anew from now on" in mesh.log.read_text()
    assert not standbys(mesh)


def test_standbys_are_listed_and_end_with_the_mesh(serve: Any) -> None:
    mesh = serve("--standby", "--worker", "hash")
    found = standbys(mesh)
    listed = subprocess.run(
        [*COMMAND, "ps", "--tree"], env=mesh.environment, capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in listed.stdout.splitlines()].count("standby") == len(found) == 2
    assert mesh.stop(signal.SIGTERM) == 0
    assert psutil.wait_procs(found, timeout=SERVES_WITHIN)[1] == []
