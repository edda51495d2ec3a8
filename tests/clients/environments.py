"""An environment for each client, made once and kept under ``build/clients``."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.table import Client

BUILD = Path("build/clients")


def interpreter(client: Client) -> Path:
    """The python of its environment, or the folder that holds its ``node_modules``; installs what is missing."""
    if not client.is_python:
        return _node_modules(client)
    borrowed = Path(os.environ.get("PEERS_ROOT", "")) / client.environment / "bin" / "python"
    if client.environment and borrowed.is_file():
        return borrowed
    home = (BUILD / client.distribution).absolute()
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(python), "-m", "pip", "install", "--quiet", *client.requirements])
        (home / "installed").touch()
    return python


def version(client: Client, home: Path) -> str:
    """Of the client's package, as installed."""
    if not client.is_python:
        package = home / "node_modules" / client.distribution / "package.json"
        return str(json.loads(package.read_text())["version"])
    code = f"import importlib.metadata as m; print(m.version({client.distribution!r}))"
    return subprocess.run([str(home), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def _node_modules(client: Client) -> Path:
    home = (BUILD / "js").absolute()
    home.mkdir(parents=True, exist_ok=True)
    names = [requirement.rpartition("@")[0] or requirement for requirement in client.requirements]
    if not all((home / "node_modules" / name).is_dir() for name in names):
        (home / "package.json").exists() or (home / "package.json").write_text('{"private": true}')
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(home), *client.requirements])
    return home


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
