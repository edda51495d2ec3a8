"""The command: builds kernels, lets setuptools build one wheel of the tree, and divides it."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenloom.gpu_worker.kernels.build_ahead import build_ahead, compiler_for, needed_glibc
from tokenloom.gpu_worker.kernels.levels import LEVELS, Level

from .division import client_paths, divided, platform_tag, with_kernels
from .wheel_file import Wheel

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Build the wheels, and print the size of each, and what each level's kernels took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", default="all", help="levels of processors, separated by commas; all; or none")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels")
    options = parser.parse_args()
    built = {level: _built(level, compiler) for level, compiler in _chosen(options.levels, parser)}
    whole = _whole()
    client, rest = divided(whole, client_paths(ROOT, whole.files))
    options.out.mkdir(parents=True, exist_ok=True)
    for old in (*options.out.glob("tokenloom-*.whl"), *options.out.glob("tokenloom_client-*.whl")):
        old.unlink()
    wheels = [client, with_kernels(rest, (), "py3-none-any")]
    for machine in dict.fromkeys(level.machine for level in built):
        levels = [level for level in built if level.machine == machine]
        libraries = [library for level in levels for library in built[level]]
        tag = platform_tag(machine, [each.read_bytes() for each in libraries], map(needed_glibc, libraries))
        wheels.append(with_kernels(rest, [level.name for level in levels], tag))
    for path in [wheel.write(options.out) for wheel in wheels]:
        _say(f"{path.stat().st_size / 1e6:5.1f} MB  {os.path.relpath(path)}")
    return 0


def write_client(folder: Path) -> Path:
    """Write the client's wheel alone into a folder, and return its path."""
    whole = _whole()
    client, _ = divided(whole, client_paths(ROOT, whole.files))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("tokenloom_client-*.whl"):
        old.unlink()
    return client.write(folder)


def _chosen(names: str, parser: argparse.ArgumentParser) -> Iterator[tuple[Level, str]]:
    """Yield the levels with a compiler for each; ends with a usage error for a level that cannot be built here."""
    known = {level.name: level for level in LEVELS}
    if names == "all":
        yield from ((level, compiler) for level in LEVELS if (compiler := compiler_for(level)) is not None)
        return
    for name in filter(None, names.replace("none", "").split(",")):
        if name not in known:
            parser.error(f"--levels: {name} is not among {', '.join(known)}")
        if (compiler := compiler_for(known[name])) is None:
            parser.error(f"--levels: {name} needs a C++ compiler for {known[name].machine}: install g++")
        yield known[name], compiler


def _built(level: Level, compiler: str) -> list[Path]:
    started, before = time.monotonic(), os.times()
    libraries = build_ahead(level, compiler)
    wall, after = time.monotonic() - started, os.times()
    compiling = after.children_user + after.children_system - before.children_user - before.children_system
    _say(f"{level.name}: {len(libraries)} libraries in {wall:.0f} s, {compiling:.0f} s of CPU")
    return libraries


def _whole() -> Wheel:
    """Let pip build the wheel of the whole tree, in an environment of its own with setuptools and nothing else."""
    for left in (ROOT / "build" / "lib", *(ROOT / "build").glob("bdist.*")):
        subprocess.run(["rm", "-rf", str(left)], check=True)  # setuptools packs what an earlier build left there
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, check=True)
        (path,) = Path(folder).glob("*.whl")
        return Wheel.read(path)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
