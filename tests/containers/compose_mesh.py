"""docker-compose.yml run with podman: requests are answered, and answered again after a part was killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from openai import OpenAI

from tests.containers.podman import BUILD, HERE, ROOT, podman, run, step
from tests.hub_mirror import HubMirror
from tokenloom.model_files.model_path import DEMO_MODEL

URL = "http://127.0.0.1:58000"
_FILLER = "Read this and wait: one two three four five six seven eight nine ten. " * 12
"""Makes a prompt long enough for both engines."""


def serve_a_directory() -> None:
    """``MODEL=./NAME``, in the folder that ``MODEL_DIR`` names."""
    shutil.copytree(DEMO_MODEL, BUILD / "models" / "copied-demo", dirs_exist_ok=True)
    with _mesh({"MODEL": "./copied-demo", "MODEL_DIR": str(BUILD / "models")}):
        ask(URL, "copied-demo")


def serve_a_hub_id(mirror: HubMirror) -> None:
    """``MODEL=org/name``, downloaded once for all parts."""
    mirror.downloads.clear()
    with _mesh({"MODEL": mirror.name, "HF_ENDPOINT": mirror.url}):
        assert mirror.downloads["model.safetensors"] == 1, mirror.downloads
        ask(URL, mirror.name)
        for part in ("prefill", "output-processor", "tokenizer"):
            with step(f"{part} killed, replaced, and answering again"):
                _kill(part)
                ask(URL, mirror.name)


def ask(url: str, model: str, key: str = "none") -> None:
    """Ask with and without a stream, and expect the same answer."""
    client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=8)  # 503 means: try again
    messages = [{"role": "user", "content": f"{_FILLER}What is 3 plus 4?"}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0)  # type: ignore[call-overload]
    chunks = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)  # type: ignore[call-overload]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content, (text, whole)
    print(f"asked twice, streamed and not: {text!r}", flush=True)


def wait_until_healthy(url: str, seconds: float) -> None:
    """Return when the mesh would answer a request. Raises ``AssertionError`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return
        assert time.monotonic() < deadline, f"not healthy within {seconds:g} s"
        time.sleep(0.5)


@contextlib.contextmanager
def _mesh(variables: dict[str, str]) -> Iterator[None]:
    """Run docker-compose.yml with these variables."""
    os.environ.update(variables)
    try:
        with step(f"compose up with MODEL={variables['MODEL']}, until a request would be answered"):
            _compose("up", "-d", "--no-build")
            wait_until_healthy(URL, 180)
        yield
    finally:
        _compose("logs", "--tail", "20", check=False) if sys.exc_info()[0] else None
        with step("down"):
            _compose("down", "--volumes")
        for name in variables:
            del os.environ[name]


def _kill(service: str) -> None:
    """End the container's process as a crash would; podman starts another."""
    name = f"tokenloom_{service}_1"
    pid = int(podman("inspect", "--format", "{{.State.Pid}}", name))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while int(podman("inspect", "--format", "{{.State.Pid}}", name)) in (0, pid) or not _is_healthy(name):
        assert time.monotonic() < deadline, f"{service} was not started again"
        time.sleep(0.2)


def _is_healthy(container: str) -> bool:
    """Run the container's health check, which podman without systemd does not do by itself."""
    return subprocess.run(["podman", "healthcheck", "run", container], check=False, capture_output=True).returncode == 0


def _compose(*arguments: str, check: bool = True) -> None:
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(HERE / "compose.host.yml"))
    run(str(BUILD / "venv/bin/podman-compose"), *files, *arguments, check=check)
