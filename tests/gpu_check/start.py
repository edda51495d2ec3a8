"""``make gpu-check``: starts the check with any Python that has torch, without installing anything.

It links this clone's packages into a temporary folder, because ``tokenloom``'s parts are links that a copy of the clone
may have lost, and runs each section in a process of its own with a deadline: one that fails or hangs stops no other.
Without a GPU it prints one line, and without the packages that the engine imports one that says how to fetch their
wheels. It needs no network.

``--sections`` chooses some; what earlier calls found in the others stays in ``--results``, so that two short calls make
one table. Everything that sections print is in ``log.txt`` beside it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"bench": "benchmarks", "engine_core": "engine_core", "gpu_worker": "gpu_worker", "services": "services"}
STAGES = (
    {"ceilings": 20.0},
    # These compare numbers and measure no times. Most of theirs is spent on compiling kernels, each on a core.
    {"kernels": 100.0, "tokens": 110.0, "features": 110.0, "pair": 80.0},
    {"speeds": 90.0},
    {"model": 130.0},
    {"compare": 60.0},
    {"kv": 60.0},
)
"""Sections that run at the same time, with their deadlines in seconds, in the order in which they run."""
DEADLINES = {name: seconds for stage in STAGES for name, seconds in stage.items()}
SECONDS = 480.0
"""Of all sections together."""
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 11)
WHEELS = {"msgspec": "msgspec", "zmq": "pyzmq", "safetensors": "safetensors", "tokenizers": "tokenizers"}
"""What sections import beside torch, triton and numpy: modules, and the packages that have them."""
_KILLED_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    started, options = time.monotonic(), _options(arguments)
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
    wanted = options.sections.split(",") if options.sections else list(DEADLINES)
    if unknown := [name for name in wanted if name not in DEADLINES]:
        print(f"gpu-check: unknown sections {', '.join(unknown)}; there are {', '.join(DEADLINES)}")
        return 1
    with tempfile.TemporaryDirectory(prefix="tl-gpu-") as folder:
        link_packages(ROOT, Path(folder))
        unpack_wheels(options.wheels, Path(folder))
        if lacking := missing(folder):
            print(f"gpu-check: {', '.join(lacking)} cannot be imported: {fetch_command(lacking, options.wheels)}")
            return 1
        results: Path = options.results
        results.mkdir(parents=True, exist_ok=True)
        print(
            f"gpu-check on {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, rows in {results}", flush=True
        )
        write_versions(results)
        failed = run_sections(wanted, Path(folder), results, started + SECONDS)
    left_out = not_run(results)
    print(f"gpu-check: failed: {', '.join(failed)}" if failed else "gpu-check: passed")
    if left_out:
        print(f"gpu-check: not run: {'; '.join(left_out)}")
    return bool(failed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sections", default="", help=f"some of {', '.join(DEADLINES)}, by commas; by default all")
    parser.add_argument("--results", type=Path, default=ROOT / "build/gpu_check", help="folder of rows, table and log")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "build/gpu_wheels", help="folder of wheels to import from"
    )
    return parser.parse_args(arguments)


def missing(folder: str) -> list[str]:
    """Return the packages that the engine needs and neither this Python nor ``folder`` has."""
    sys.path.insert(0, folder)
    try:
        return [package for module, package in WHEELS.items() if not _is_there(module)]
    finally:
        sys.path.remove(folder)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def fetch_command(packages: Sequence[str], wheels: Path) -> str:
    """Return what to run where there is a network, so that the next call finds the packages."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"fetch their wheels with `pip download --no-deps --only-binary :all: --python-version {python} --platform "
        f"manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest {wheels} {' '.join(packages)}`"
    )


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


def unpack_wheels(wheels: Path, folder: Path) -> None:
    """Make the packages of the wheels in the folder ``wheels``, if there is one, importable from ``folder``."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)


def run_sections(
    names: Sequence[str],
    folder: Path,
    results: Path,
    end: float,
    command: tuple[str, ...] = ("-m", "tests.gpu_check"),
    stages: Sequence[dict[str, float]] = STAGES,
) -> list[str]:
    """Run sections, those of a stage at the same time, until ``end``, by the monotonic clock. Returns the names of
    those that failed.

    What earlier calls found in them is dropped. The table is written anew after each stage.
    """
    for file in ("rows.jsonl", "sections.jsonl"):
        kept = [row for row in lines_of(results / file) if row["section"] not in names]
        (results / file).write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    failed = []
    for stage in stages:
        outcomes: dict[str, bool] = {}

        def run(name: str, seconds: float, outcomes: dict[str, bool] = outcomes) -> None:
            deadline = max(0.1, min(seconds, end - time.monotonic()))
            outcomes[name] = run_section(name, deadline, folder, results, command)

        chosen = {name: seconds for name, seconds in stage.items() if name in names}
        threads = [threading.Thread(target=run, args=each) for each in chosen.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed += [name for name in chosen if not outcomes.get(name)]
        write_table(results)
    return failed


def run_section(
    name: str, deadline: float, folder: Path, results: Path, command: tuple[str, ...] = ("-m", "tests.gpu_check")
) -> bool:
    """Run one section; its rows are printed and kept as they come. Returns whether it ended well in time."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), *_python_path()]),
        "PYTHONUNBUFFERED": "1",
        # Sections run side by side, and one has a process for each core: with a thread for each core in all of them,
        # they would wait for each other.
        "OMP_NUM_THREADS": "1" if name == "kernels" else "4",
    }
    environment.pop("TRITON_INTERPRET", None)
    started = time.monotonic()
    print(f"== {name}", flush=True)
    arguments = [sys.executable, *command, name, str(results)]
    # A group of its own, so that the processes that a section starts end with it.
    with subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(name, process.stdout, results / "log.txt"))
        reader.start()
        try:
            code = process.wait(deadline)
            reason = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"was stopped at its deadline of {deadline:.3g} s"
        finally:
            _kill_group(process.pid)
            reader.join(_KILLED_SECONDS)
    seconds = time.monotonic() - started
    if code:
        print(f"== {name} {reason} after {seconds:.0f} s", flush=True)
    with (results / "sections.jsonl").open("a") as file:
        file.write(json.dumps({"section": name, "ok": not code, "seconds": round(seconds, 1), "end": reason}) + "\n")
    return not code


def _copy(name: str, output: IO[str], log: Path) -> None:
    """Print what a section prints, and keep it with the section's name."""
    with log.open("a") as file:
        for line in output:
            print(line, end="", flush=True)
            file.write(f"{name}: {line}")
            file.flush()


def write_table(results: Path) -> None:
    """Write the rows so far as ``table.md``, of which ``tests/gpu_check/h200.md`` keeps one, with what failed sections
    printed last."""
    versions = lines_of(results / "versions.json")
    lines = [f"{key}: {value}" for each in versions for key, value in each.items() if value]
    lines += ["", "| section | what | found |", "|---|---|---|"]
    for row in lines_of(results / "rows.jsonl"):
        values = {key: value for key, value in row.items() if key not in ("section", "name", "not_run")}
        found = f"**not run**: {row['not_run']}" if "not_run" in row else shown(values)
        lines.append(f"| {row['section']} | {row['name']} | {found} |")
    sections = lines_of(results / "sections.jsonl")
    for row in sections:
        if not row["ok"]:
            lines.append(f"| {row['section']} | **failed** | {row['end']} after {row['seconds']} s |")
    done = {row["section"] for row in sections}
    lines += [f"| {name} | **not run** | |" for name in DEADLINES if name not in done]
    log = (results / "log.txt").read_text().splitlines() if (results / "log.txt").exists() else []
    for row in sections:
        if not row["ok"]:
            own = [line for line in log if line.startswith(f"{row['section']}: ")][-_LAST_LINES:]
            lines += ["", f"The last lines of {row['section']}:", "", *(f"    {line}" for line in own)]
    (results / "table.md").write_text("\n".join(lines) + "\n")


_LAST_LINES = 30


def not_run(results: Path) -> list[str]:
    """Return the rows that sections left out, and the sections that no call has run."""
    rows = [row["name"] for row in lines_of(results / "rows.jsonl") if "not_run" in row]
    done = {row["section"] for row in lines_of(results / "sections.jsonl")}
    return rows + [name for name in DEADLINES if name not in done]


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
