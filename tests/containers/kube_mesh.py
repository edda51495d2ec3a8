"""The overlay ``hub`` run with ``podman kube play``: a model of the hub, pods killed, a pod added under load."""

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

from tests.containers.compose_mesh import ask, wait_until_healthy
from tests.containers.kube_pods import Pod, address_of, make_pod, replica_names, to_text
from tests.containers.podman import BUILD, podman, run, step
from tests.containers.processor_time import QUIET, OtherPrograms, container_cpu_seconds
from tests.hub_mirror import HubMirror
from tokenloom.supervisor.certificates import make_separate_certificates
from tools import helm_chart

KEY = "a-key-of-this-test"
ADDED = "engine-2"
SERVES_WITHIN = 20.0
"""Seconds from the start of an added pod, whose image is there, to its first request, on a quiet machine."""
SERVES_WITHIN_CPU = 10.0
"""Seconds of processor time that its engine may use until then, on any machine."""
FOLDER = BUILD / "kube"
SECRETS = FOLDER / "secrets"
USER = 10001
"""Under which the images run."""


class KubeMesh:
    """Runs the pods of the overlay, and one more engine when it is asked to."""

    def __init__(self, mirror: HubMirror) -> None:
        self.objects = copy.deepcopy(helm_chart.build("cpu", "model-store"))
        self.objects["ConfigMap/tokenloom-model"]["data"]["TOKENLOOM_MODEL"] = mirror.name
        self.objects["ConfigMap/tokenloom-hub"]["data"]["HF_ENDPOINT"] = mirror.url
        self._replicas = replica_names(self.objects)
        self._names = [*self._replicas, ADDED, "model-fetch-0"]
        gateways = [name for name in self._replicas if name.startswith("gateway")]
        self.urls = [f"http://{address_of(name, self._names)}:8000" for name in gateways]

    def start(self) -> None:
        """Make the volume and the secrets, and start the Job and then all pods, which wait for it."""
        _make_secrets()
        self._play("volume", self.objects["PersistentVolumeClaim/models"])
        for name in ("model-fetch-0", *self._replicas):
            self.start_pod(name)

    def start_pod(self, name: str) -> None:
        self._play(name, make_pod(self.objects, name, self._names, SECRETS))

    def kill_pod(self, name: str) -> None:
        """End all processes of a pod at once, and remove it; nothing starts it again."""
        podman("pod", "kill", name)
        podman("pod", "rm", "--force", name)

    def stop(self) -> None:
        for file in FOLDER.glob("*.json"):
            run("podman", "kube", "down", str(file), check=False)
            file.unlink()
        run("podman", "volume", "rm", "--force", "models", check=False)

    def log_of(self, pod: str) -> str:
        """Return what the part wrote, which is to its standard error."""
        command = ["podman", "logs", f"{pod}-{pod.rpartition('-')[0]}"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout

    def engines(self) -> list[str]:
        return [name for name in self._names if name.startswith("engine-")]

    def log(self) -> str:
        return podman("ps", "--all") + "\n" + (BUILD / "log.txt").read_text()[-4000:]

    def _play(self, name: str, *objects: Pod) -> None:
        file = FOLDER / f"{name}.json"
        file.write_text(to_text(*objects))
        run("podman", "kube", "play", str(file))


def _make_secrets() -> None:
    """Make what docs/operate/kubernetes.md describes: certificates by part, API keys, the secret of the salts."""
    for folder in (SECRETS, FOLDER / "certificates"):
        shutil.rmtree(folder, ignore_errors=True)
    for path in make_separate_certificates(FOLDER / "certificates", days=30):
        _write(f"tokenloom-{path.parent.name}-tls", path.name, path.read_text())
    _write("tokenloom-api-keys", "api-keys", hashlib.sha256(KEY.encode()).hexdigest())
    _write("tokenloom-api-keys", "cache-salt-secret", "0123456789abcdef")
    (SECRETS / "tokenloom-hub-token").mkdir()  # an optional Secret that does not exist


def _write(secret: str, file: str, content: str) -> None:
    """Write a file that only the user of the images may read."""
    path = SECRETS / secret / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    os.chown(path, USER, USER)
    path.chmod(0o400)


def serve_a_hub_id(mirror: HubMirror) -> None:
    """Ask, kill an engine and a tokenizer, add an engine under load, and ask again after each."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    mirror.downloads.clear()
    mesh = KubeMesh(mirror)
    try:
        with step("kube play of the overlay with a model of the hub, until a request would be answered"):
            mesh.start()
            for url in mesh.urls:
                wait_until_healthy(url, 180)
        assert set(mirror.downloads.values()) == {1}, mirror.downloads
        ask(mesh.urls[0], mirror.name, KEY)
        for pod in ("engine-0", "tokenizer-0"):
            with step(f"{pod} killed, its requests answered by others, and replaced"):
                mesh.kill_pod(pod)
                ask(mesh.urls[1], mirror.name, KEY)
                mesh.start_pod(pod)
        with _load(mesh.urls[0], mirror.name):
            added = _add_engine(mesh)
        compiled = [name for name in mesh.engines() if "compiling" in mesh.log_of(name)]
        assert not compiled, f"{compiled} compiled kernels, which the image should have"
        added.judge()
    except BaseException:
        print(mesh.log(), file=sys.stderr)
        raise
    finally:
        with step("down"):
            mesh.stop()


@dataclass(frozen=True, slots=True)
class Added:
    """What it took an added engine to compute its first request.

    Attributes:
        seconds: From the pod's start until a gateway shows requests in its batch.
        cpu_seconds: Processor time of its container.
        other_cores: What programs that are not of this mesh used meanwhile.
    """

    seconds: float
    cpu_seconds: float
    other_cores: float

    def judge(self) -> None:
        """Print the figures, and raise ``AssertionError`` if a limit that applies is exceeded."""
        print(
            f"{ADDED} added under load: it computes requests after {self.seconds:.1f} s, {self.cpu_seconds:.1f} s of "
            f"CPU; other programs used {self.other_cores:.2f} cores",
            flush=True,
        )
        assert self.cpu_seconds <= SERVES_WITHIN_CPU, f"more than {SERVES_WITHIN_CPU:g} s of CPU"
        if self.other_cores > QUIET:
            print(f"  not compared with the limit of {SERVES_WITHIN:g} s, which is for a quiet machine", flush=True)
        else:
            assert self.seconds <= SERVES_WITHIN, f"more than {SERVES_WITHIN:g} s"


def _add_engine(mesh: KubeMesh) -> Added:
    """Start one more engine, and wait until a gateway shows requests in its batch."""
    running = re.compile(rf'^tokenloom_engine_requests_running\{{engine="{ADDED}",[^}}]*\}} ([0-9.]+)$', re.MULTILINE)
    begin, others = time.monotonic(), OtherPrograms()
    mesh.start_pod(ADDED)
    while time.monotonic() - begin < 10 * SERVES_WITHIN:
        match = running.search(_read(f"{mesh.urls[0]}/metrics"))
        if match is not None and float(match[1]) > 0:
            break
        time.sleep(0.1)
    seconds = time.monotonic() - begin
    return Added(seconds, container_cpu_seconds(f"{ADDED}-engine"), others.cores())


@contextlib.contextmanager
def _load(url: str, model: str, clients: int = 4) -> Iterator[None]:
    """Let clients ask one request after the other; each must be answered."""
    ended, failures = threading.Event(), list[BaseException]()

    def client(index: int) -> None:
        try:
            while not ended.is_set():
                prompt = f"{index} Tell a story of {time.monotonic()}."
                body = {"model": model, "prompt": prompt, "max_tokens": 64, "ignore_eos": True}
                _post(f"{url}/v1/completions", body)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures, failures


def _post(url: str, body: dict[str, object]) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.status == 200


def _read(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        text: str = response.read().decode()
    return text
