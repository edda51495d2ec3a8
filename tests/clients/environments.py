"""An environment for each client, made once and kept under ``build/clients``."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.table import Client
from tools.stubs import debian, go_stubs, npm_stubs
from tools.stubs.protoc import BUILD as STUBS
from tools.wheels.command import write_client
from tools.wheels.division import CLIENT

BUILD = Path("build/clients")
TORCH = "torch==2.13.0"
"""As the engines have it, from the Makefile's ``TORCH_INDEX``: a later one would draw CUDA's libraries."""


def interpreter(client: Client) -> Path:
    """The python of its environment, or the folder that holds its ``node_modules``; installs what is missing."""
    borrowed = Path(os.environ.get("PEERS_ROOT", "")) / client.environment / "bin" / "python"
    if client.environment and borrowed.is_file():
        return borrowed
    home = (BUILD / Path(client.script).name.replace("_client", "").replace(".", "-")).absolute()
    stubs = _write_stubs(client)
    wanted = "\n".join((*client.requirements, *(hashlib.sha256(each.read_bytes()).hexdigest() for each in stubs)))
    mark = home / "installed"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if client.is_python:
            _install_python(client, home, stubs)
        else:
            _install_node(home, (*client.requirements, *map(str, stubs)))
        mark.write_text(wanted)
    return home / "bin" / "python" if client.is_python else home


def version(client: Client, home: Path) -> str:
    """Of the client's package, as installed, or of its program."""
    if client.stubs == "go":
        return debian.version(debian.LIBRARY)
    if client.program:
        return subprocess.run([client.program, "--version"], check=True, capture_output=True, text=True).stdout.split()[
            1
        ]
    if not client.is_python:
        package = home / "node_modules" / client.distribution / "package.json"
        return str(json.loads(package.read_text())["version"])
    distribution = CLIENT if client.stubs == "python" else client.distribution
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run([str(home), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _install_python(client: Client, home: Path, stubs: Sequence[Path]) -> None:
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if client.torch:
        index = os.environ.get("TORCH_INDEX")
        _run([*pip, *(["--index-url", index] if index else []), TORCH])
    if requirements := (*client.requirements, *map(str, stubs)):
        _run([*pip, *requirements, *([TORCH] if client.torch else [])])
    if client.without:
        _run([str(home / "bin" / "python"), "-m", "pip", "uninstall", "--quiet", "--yes", *client.without])


def _write_stubs(client: Client) -> tuple[Path, ...]:
    """Write the stubs that a client needs, and return the packages of them that its environment installs."""
    if client.stubs == "npm":
        return (npm_stubs.write(),)
    if client.stubs == "python":
        return (write_client(STUBS),)
    if client.stubs == "go":
        go_stubs.write()
    return ()


def _install_node(home: Path, requirements: Sequence[str]) -> None:
    (home / "package.json").write_text('{"private": true}')
    _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *requirements])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
