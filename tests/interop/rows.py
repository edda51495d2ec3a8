"""The rows of the interop matrix: a peer, a direction, and what shows that both work together."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import smg_router, vllm_mesh
from .vllm_server import VLLMProcess, find_program

BEHIND_OURS, BEHIND_THEIRS = "theirs behind ours", "ours behind theirs"
PROCESS, RECORDED = "real process", "recorded exchange"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What came of a row. ``is_failure``: whether it ran and did not do what it should."""

    version: str
    text: str
    is_failure: bool = False


NOT_INSTALLED = Result("", "not installed")


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        peer: Whose part it is.
        program: What runs; empty: nothing of theirs, but the tests below.
        run: Runs the program that was found; it returns the version and what came of it, or raises.
        tests: Tests that repeat recorded exchanges.
        version: Of the contract that these follow.
    """

    peer: str
    direction: str
    subject: str
    program: str = ""
    run: Callable[[str, Path, int], Result] | None = None
    tests: tuple[str, ...] = ()
    version: str = ""

    @property
    def how(self) -> str:
        return PROCESS if self.run is not None else RECORDED


def run_row(row: Row, roots: tuple[str, ...], directory: Path, num_requests: int) -> Result:
    """Run a row. ``roots``: see :func:`.find_program`."""
    if row.run is None:
        return _run_tests(row)
    if (program := find_program(row.program, roots)) is None:
        return NOT_INSTALLED
    try:
        return row.run(program, directory, num_requests)
    except Exception as error:
        return Result("", f"failed: {type(error).__name__}: {' '.join(str(error).split())[:400]}", is_failure=True)


def _run_tests(row: Row) -> Result:
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", *row.tests)
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    passed, skipped = (re.search(rf"(\d+) {word}", last) for word in ("passed", "skipped"))
    if done.returncode or passed is None:
        return Result(row.version, f"failed: {last}", is_failure=True)
    return Result(row.version, f"works: {passed[1]} tests" + (f", {skipped[1]} did not run" if skipped else ""))


def _run_vllm(program: str, directory: Path, num_requests: int) -> Result:
    server = VLLMProcess(program, directory)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        print(f"  {line}", file=sys.stderr, flush=True)

    try:
        server.start()
        server.wait()
        version = server.version
        outcome = asyncio.run(vllm_mesh.campaign(server, directory, num_requests, report))
        server.wait()
        constraints = vllm_mesh.check_constraints(server)
    finally:
        server.kill()
    engines = len(outcome.by_engine)
    text = f"{num_requests} requests, {outcome.num_failed} failed; {'; '.join(lines[-2:])}; {constraints}"
    return Result(version, text, is_failure=bool(outcome.num_failed) or engines < 2)


def _run_smg(program: str, directory: Path, num_requests: int) -> Result:
    version, compared = smg_router.check_router(program, directory)
    return Result(version, f"works: {compared}")


ROWS = (
    Row("vLLM", BEHIND_OURS, "vllm serve as an engine, killed by turns with ours", "vllm", _run_vllm),
    Row(
        "vLLM",
        BEHIND_OURS,
        "its token-in-token-out form, and what it does not do",
        tests=("tests/services/engine/core/test_vllm_core.py", "tests/mesh/test_remote_vllm.py"),
        version="0.32",
    ),
    Row(
        "vLLM",
        BEHIND_THEIRS,
        "render, derender and /inference/v1/generate, gRPC VllmEngine",
        tests=("tests/mesh/answers/test_rendered_answers.py",),
        version="0.32",
    ),
    Row("vLLM", BEHIND_THEIRS, "KV events", tests=("tests/mesh/test_published_kv_events.py",), version="0.32"),
    Row("SMG", BEHIND_THEIRS, "its router over gRPC VllmEngine, chats and completions", "smg", _run_smg),
    Row(
        "llm-d",
        BEHIND_THEIRS,
        "endpoint picker: metrics of one engine's gateway, requests placed there",
        tests=("tests/mesh/test_beside_engine.py", "tests/observability/test_catalogue.py"),
        version="not stated",
    ),
    Row(
        "Envoy",
        BEHIND_THEIRS,
        "ORCA load reports in headers",
        tests=("tests/services/gateway/endpoints/test_orca.py",),
        version="not stated",
    ),
)
