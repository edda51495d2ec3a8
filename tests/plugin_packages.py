"""Packages with plugins, installed by hand into a directory: a module, and the metadata that an installer writes."""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
EXAMPLE_NAME = "tokenloom-example"


def install(
    directory: Path, name: str, points: Mapping[str, Mapping[str, str]], source: str = "", version: str = "1.0"
) -> None:
    """Install a package whose module has the name's underscored form. ``points``: targets by group and name."""
    module = name.replace("-", "_")
    sys.modules.pop(module, None)  # of an earlier test, whose directory is gone
    info = directory / f"{module}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{point} = {target}\n" for point, target in targets.items())
        for group, targets in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    (directory / f"{module}.py").write_text(source)


def install_example(directory: Path) -> None:
    """Install the package of ``examples/plugin``, as its own ``pyproject.toml`` describes it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    source = (EXAMPLE / "tokenloom_example.py").read_text()
    install(directory, project["name"], project["entry-points"], source, project["version"])


def pip_install_example(directory: Path, copy: Path) -> None:
    """Let pip build and install the package into a directory, from a ``copy`` outside of this tree, as a user does."""
    shutil.copytree(EXAMPLE, copy)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    command = (sys.executable, "-m", "pip", "install", *offline, "--target", str(directory), str(copy))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def remove(directory: Path) -> None:
    """Remove all packages of a directory."""
    shutil.rmtree(directory)
