"""``make gpu-check``: starts the check with any Python that has torch, without installing anything.

It links this clone's packages into a temporary folder, because ``tokenloom``'s parts are links that a copy of the clone
may have lost, and runs each section in a process of its own with a deadline: one that fails or hangs stops no other.
Without a GPU it prints one line. It needs no network. The modules of the worker need msgspec; where that is missing,
the sections that use them fail with its name.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"bench": "benchmarks", "engine_core": "engine_core", "gpu_worker": "gpu_worker", "services": "services"}
DEADLINES = {"ceilings": 30, "kernels": 110, "tokens": 110, "speeds": 75, "model": 155}
"""Section to seconds. Together they take at most eight minutes."""


def main() -> int:
    try:
        import torch
    except ModuleNotFoundError:
        print(f"gpu-check: skipped: {sys.executable} has no torch")
        return 0
    if not torch.cuda.is_available():
        print(f"gpu-check: skipped: PyTorch {torch.__version__} finds no GPU")
        return 0
    results = Path(os.environ.get("GPU_CHECK_RESULTS", ROOT / "build/gpu_check"))
    results.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, rows in {results}", flush=True)
    wanted = sys.argv[1:] or list(DEADLINES)
    with tempfile.TemporaryDirectory(prefix="tl-gpu-") as folder:
        link_packages(ROOT, Path(folder))
        failed = [name for name in wanted if not run_section(name, DEADLINES[name], Path(folder), results)]
    print(f"gpu-check: failed: {', '.join(failed)}" if failed else "gpu-check: passed")
    return bool(failed)


def link_packages(root: Path, folder: Path) -> None:
    """Make ``tokenloom`` and ``tests`` importable from ``folder``."""
    package = folder / "tokenloom"
    package.mkdir()
    for entry in (root / "tokenloom").iterdir():
        if entry.name not in LINKS and entry.name != "v1" and entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for name, target in LINKS.items():
        (package / name).symlink_to(root / target)
    (package / "v1").symlink_to(root / "protos/tokenloom/v1")
    tests = folder / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()  # a package of that name among the installed ones would win otherwise
    for entry in (root / "tests").iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            (tests / entry.name).symlink_to(entry)


def run_section(
    name: str, deadline: float, folder: Path, results: Path, command: tuple[str, ...] = ("-m", "tests.gpu_check")
) -> bool:
    """Run one section; its rows are printed and kept as they come. Returns whether it ended well in time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *_python_path()]), "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    print(f"== {name}", flush=True)
    arguments = [sys.executable, *command, name, str(results)]
    try:
        code = subprocess.run(arguments, cwd=folder, env=environment, timeout=deadline, check=False).returncode
        reason = f"ended with {code}"
    except subprocess.TimeoutExpired:
        code, reason = 1, f"was stopped at its deadline of {deadline:g} s"
    seconds = time.monotonic() - started
    if code:
        print(f"== {name} {reason} after {seconds:.0f} s", flush=True)
    with (results / "sections.jsonl").open("a") as file:
        file.write(json.dumps({"section": name, "ok": not code, "seconds": round(seconds, 1), "end": reason}) + "\n")
    return not code


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    sys.exit(main())
