"""Records what a worker computes, for TensorBoard, Perfetto or chrome://tracing."""

import os
import re
import socket
from pathlib import Path

import torch

_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,100}")


class Profiler:
    """Runs torch's profiler and writes a compressed trace to a directory that the operator chose."""

    def __init__(self, directory: str) -> None:
        """``directory`` is made when it is needed; empty: profiling is refused."""
        self._directory = directory
        self._profile: torch.profiler.profile | None = None

    def start(self, prefix: str = "") -> None:
        """Start to record, which makes steps slower. ``prefix``: begins the name of the file.

        Raises ``ValueError`` if profiling is off or already recording, and for a prefix that is no part of a name.
        """
        if not self._directory:
            raise ValueError("profiling is off: the engine was started without profiler_dir")
        if self._profile is not None:
            raise ValueError("a profile is being recorded already")
        # It may come from a client of the gateway: the file stays in the operator's directory.
        if not _PREFIX.fullmatch(prefix):
            raise ValueError("profile_prefix may hold letters, digits, '.', '-' and '_', at most 100")
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        name = f"{prefix}_{socket.gethostname()}_{os.getpid()}" if prefix else None
        write = torch.profiler.tensorboard_trace_handler(self._directory, worker_name=name, use_gzip=True)
        profile = torch.profiler.profile(on_trace_ready=write)
        profile.start()
        self._profile = profile

    def stop(self) -> None:
        """Stop and write the trace. Raises ``ValueError`` if nothing is being recorded."""
        if self._profile is None:
            raise ValueError("no profile is being recorded")
        profile, self._profile = self._profile, None
        profile.stop()

    def close(self) -> None:
        """End a recording, if there is one. Idempotent."""
        if self._profile is not None:
            self.stop()
