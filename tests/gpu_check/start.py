"""``make gpu-check``: starts the check with any Python that has torch, without installing anything.

It links this clone's packages into a temporary folder, because ``tokenloom``'s parts are links that a copy of the clone
may have lost, and runs each section in a process of its own with a deadline: one that fails or hangs stops no other.
Without a GPU it prints one line. It needs no network. Where packages that the engine imports are missing (msgspec, or
pyzmq for the engine core), sections that need them fail with their names, unless ``GPU_CHECK_WHEELS`` names a folder of
their wheels, which are unpacked into the temporary folder.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"bench": "benchmarks", "engine_core": "engine_core", "gpu_worker": "gpu_worker", "services": "services"}
DEADLINES = {"ceilings": 20, "kernels": 90, "tokens": 60, "speeds": 90, "model": 120, "kv": 40, "compare": 60}
"""Section to seconds, in the order in which they run."""
SECONDS = 480.0
"""Of all sections together."""
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)


def main() -> int:
    started = time.monotonic()
    try:
        import torch
    except ModuleNotFoundError:
        print(f"gpu-check: skipped: {sys.executable} has no torch")
        return 0
    if not torch.cuda.is_available():
        print(f"gpu-check: skipped: PyTorch {torch.__version__} finds no GPU")
        return 0
    if sys.version_info < LEAST_PYTHON or version(torch.__version__) < LEAST_TORCH:
        print(f"gpu-check: needs Python 3.11 and PyTorch 2.11, not {sys.version.split()[0]} and {torch.__version__}")
        return 1
    results = Path(os.environ.get("GPU_CHECK_RESULTS", ROOT / "build/gpu_check"))
    results.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:] or list(DEADLINES)
    if unknown := [name for name in wanted if name not in DEADLINES]:
        print(f"gpu-check: unknown sections {', '.join(unknown)}; there are {', '.join(DEADLINES)}")
        return 1
    print(f"gpu-check on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, rows in {results}", flush=True)
    write_versions(results)
    with tempfile.TemporaryDirectory(prefix="tl-gpu-") as folder:
        link_packages(ROOT, Path(folder))
        unpack_wheels(os.environ.get("GPU_CHECK_WHEELS", ""), Path(folder))
        failed = run_sections(wanted, Path(folder), results, started + SECONDS)
    print(f"gpu-check: failed: {', '.join(failed)}" if failed else "gpu-check: passed")
    return bool(failed)


def version(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as 2.11.0+cu130."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(digit for digit in minor if digit.isdigit()))


def write_versions(results: Path) -> None:
    """Keep what the rows were measured with, in ``versions.json``."""
    import torch

    found = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "gpu": torch.cuda.get_device_name()}
    found |= {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("triton", "numpy", "transformers", "flashinfer", "msgspec"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    (results / "versions.json").write_text(json.dumps(found) + "\n")


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


def unpack_wheels(wheels: str, folder: Path) -> None:
    """Make the packages of the wheels in the folder ``wheels`` importable from ``folder``; empty: there are none."""
    for wheel in sorted(Path(wheels).glob("*.whl")) if wheels else ():
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)


def run_sections(
    names: list[str],
    folder: Path,
    results: Path,
    end: float,
    command: tuple[str, ...] = ("-m", "tests.gpu_check"),
    deadlines: dict[str, float] | None = None,
) -> list[str]:
    """Run sections one after the other until ``end``, by the monotonic clock. Returns the names of those that failed.

    The table is written anew after each.
    """
    failed = []
    for name in names:
        deadline = min((deadlines or DEADLINES)[name], end - time.monotonic())
        if not run_section(name, max(0.1, deadline), folder, results, command):
            failed.append(name)
        write_table(results)
    return failed


def run_section(
    name: str, deadline: float, folder: Path, results: Path, command: tuple[str, ...] = ("-m", "tests.gpu_check")
) -> bool:
    """Run one section; its rows are printed and kept as they come. Returns whether it ended well in time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *_python_path()]), "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    print(f"== {name}", flush=True)
    arguments = [sys.executable, *command, name, str(results)]
    # A group of its own, so that the processes that a section starts end with it.
    with subprocess.Popen(arguments, cwd=folder, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(deadline)
            reason = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"was stopped at its deadline of {deadline:.3g} s"
        finally:
            _kill_group(process.pid)
    seconds = time.monotonic() - started
    if code:
        print(f"== {name} {reason} after {seconds:.0f} s", flush=True)
    with (results / "sections.jsonl").open("a") as file:
        file.write(json.dumps({"section": name, "ok": not code, "seconds": round(seconds, 1), "end": reason}) + "\n")
    return not code


def write_table(results: Path) -> None:
    """Write the rows so far as ``table.md``, as it is kept under ``benchmarks/results``."""
    versions = lines_of(results / "versions.json")
    lines = [f"{key}: {value}" for each in versions for key, value in each.items() if value]
    lines += ["", "| section | what | found |", "|---|---|---|"]
    for row in lines_of(results / "rows.jsonl"):
        values = {key: value for key, value in row.items() if key not in ("section", "name")}
        lines.append(f"| {row['section']} | {row['name']} | {shown(values)} |")
    for row in lines_of(results / "sections.jsonl"):
        if not row["ok"]:
            lines.append(f"| {row['section']} | **failed** | {row['end']} after {row['seconds']} s |")
    (results / "table.md").write_text("\n".join(lines) + "\n")


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file, of which a killed section may have left the last one unfinished."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def shown(values: dict[str, Any]) -> str:
    """Return the numbers of a row as text."""
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


if __name__ == "__main__":
    sys.exit(main())
