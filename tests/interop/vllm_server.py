"""A real ``vllm serve`` from an environment of its own, which a campaign may kill and start again."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tokenloom.model_files.model_path import DEMO_MODEL, DEMO_MODEL_NAME

PATIENCE_SECONDS = 600.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine


def find_program(name: str, roots: tuple[str, ...]) -> str | None:
    """Return a peer's program: in an environment below one of these folders, or on the path; None: not installed."""
    for root in roots:
        path = Path(root) / name / "bin" / name
        if path.exists():
            return str(path)
    return shutil.which(name)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class VLLMProcess:
    """Serves the demo model in float32 on a CPU, in a group of processes of its own."""

    def __init__(self, program: str, directory: Path) -> None:
        """``directory``: for its log and caches."""
        self._program = program
        self._directory = directory
        self.port = free_port()
        self.log = directory / "vllm.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def version(self) -> str:
        from json import loads

        with _OPENER.open(f"{self.url}/version", timeout=10) as answer:
            return str(loads(answer.read())["version"])

    def start(self) -> None:
        """Start it; it serves a minute later, see :meth:`wait`."""
        flags = (
            "--runner",
            "generate",
            "--dtype",
            "float32",
            "--max-model-len",
            "512",
            "--max-num-seqs",
            "16",
            "--enable-scale-out",
            # A small model writes line breaks between two tokens of JSON until it is cut, and of a request vLLM does
            # not read this option.
            "--structured-outputs-config",
            '{"backend": "xgrammar", "disable_any_whitespace": true}',
        )
        where = ("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", DEMO_MODEL_NAME)
        quiet = ("--no-enable-log-requests", "--disable-uvicorn-access-log", "--enforce-eager")
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CACHE_ROOT": str(self._directory / "cache"),
        }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                (self._program, "serve", str(DEMO_MODEL), *where, *flags, *quiet),
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return when it is healthy. Raises ``RuntimeError`` with the end of its log if it does not become so."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                with _OPENER.open(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(1)
        raise RuntimeError(f"vllm serve did not come up:\n{self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """Kill all its processes."""
        if (process := self._process) is not None:
            self._process = None
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
