"""The mesh under attack: processes that ``tokenloom serve`` started, with the keys of two tenants or without keys."""

import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.checkpoints.whole_sound import write_whole_sound
from tests.checkpoints.whole_vision import write_whole_vision
from tests.e2e.conftest import Served, serving
from tests.e2e.test_busy import HOOK

MODEL = "tokenloom-demo"
KEYS = ("attacker-key", "neighbour-key")
STEP_SECONDS = 0.01
BUSY_SECONDS = 5.0
"""For so long does SIGUSR2 keep an event loop busy."""


@dataclass(frozen=True)
class Setup:
    """Says how to start a mesh.

    Attributes:
        keys: Whether clients need one of `KEYS`.
        flags: More flags of ``tokenloom serve``.
        descriptors: The most descriptors that a process of the mesh may have; None: what this process may have.
        hook: Whether SIGUSR2 keeps the event loop of a process busy.
        reads_images, reads_sounds, reads_videos: Whether the model is one that reads these, with an encoder.
    """

    keys: bool = True
    flags: tuple[str, ...] = ()
    descriptors: int | None = None
    hook: bool = False
    reads_images: bool = False
    reads_sounds: bool = False
    reads_videos: bool = False


class Target:
    """Addresses, keys and processes of a running mesh.

    Attributes:
        keys: The attacker's key and the neighbour's; empty: no key is needed.
        host, port: Where the gateway serves HTTP.
        grpc: Where it serves gRPC, as host:port.
        metrics: Its own metrics port, as host:port.
    """

    def __init__(self, served: Served, setup: Setup) -> None:
        self._served = served
        self.keys = KEYS if setup.keys else ()
        self.descriptors = setup.descriptors
        host, _, port = served.url.removeprefix("http://").rpartition(":")
        self.host, self.port = host, int(port)
        self._ps = served.ps()
        gateway = next(part for part in self._ps if part["service"] == "gateway")
        self.grpc: str = gateway["address"]
        self.metrics: str = gateway["metrics"]
        self.gateway = psutil.Process(gateway["pid"])

    @property
    def key(self) -> str:
        """The attacker's key; empty: none is needed."""
        return self.keys[0] if self.keys else ""

    @property
    def neighbour(self) -> str:
        """The other tenant's key; empty: none is needed."""
        return self.keys[1] if self.keys else ""

    def process(self, service: str) -> psutil.Process:
        """Return the first process of a service."""
        return psutil.Process(next(part["pid"] for part in self._ps if part["service"] == service))

    def pids(self) -> list[int]:
        """Return the processes of the mesh that live now."""
        supervisor = psutil.Process(self._served.process.pid)
        return sorted(child.pid for child in supervisor.children(recursive=False))

    def log(self) -> str:
        """Return what the mesh has logged."""
        return self._served.log.read_text(errors="replace")

    def running_requests(self) -> int:
        """Return how many requests the engines compute in their batches."""
        return self._engine_sum("vllm:num_requests_running")

    def prefix_cache(self) -> tuple[int, int]:
        """Return how many prompt tokens all engines have found in their own caches, and how many they looked up."""
        return self._engine_sum("vllm:prefix_cache_hits_total"), self._engine_sum("vllm:prefix_cache_queries_total")

    def _engine_sum(self, metric: str) -> int:
        pattern = re.compile(rf"^{metric}{{.*}} (\S+)$", re.MULTILINE)
        engines = [part["metrics"] for part in self._ps if part["service"] == "engine"]
        return sum(int(float(value)) for engine in engines for value in pattern.findall(_get(engine)))


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return text


@contextmanager
def attacked(setup: Setup) -> Iterator[Target]:
    """Run a mesh of the hash worker, whose tokens are the same each time, during the block."""
    with serving() as serve, tempfile.TemporaryDirectory() as folder:
        environment = {"TOKENLOOM_HASH_STEP_SECONDS": str(STEP_SECONDS)}
        if setup.keys:
            environment["TOKENLOOM_API_KEY"] = ",".join(KEYS)
        if setup.hook:
            environment["TEST_BUSY_SECONDS"] = str(BUSY_SECONDS)
            environment["PYTHONPATH"] = os.pathsep.join((str(HOOK), *filter(None, (os.environ.get("PYTHONPATH"),))))
        wrapper = () if setup.descriptors is None else _limited(setup.descriptors)
        model: tuple[str, ...] = ()
        if setup.reads_images:
            model = str(write_whole_vision("llava", Path(folder))), "--served-model-name", MODEL
        if setup.reads_videos:
            model = str(write_whole_vision("qwen2_vl", Path(folder))), "--served-model-name", MODEL
        if setup.reads_sounds:
            model = str(write_whole_sound("qwen2_audio", Path(folder))), "--served-model-name", MODEL
        yield Target(serve(*model, "--worker", "hash", *setup.flags, wrapper=wrapper, **environment), setup)


def _limited(descriptors: int) -> tuple[str, ...]:
    """Return a command that lowers a limit, soft and hard, and then becomes the command after it."""
    program = (
        "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)); "
        "os.execv(sys.argv[2], sys.argv[2:])"
    )
    return (sys.executable, "-c", program, str(descriptors))
