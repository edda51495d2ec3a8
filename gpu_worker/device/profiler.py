"""Records what a worker computes, for TensorBoard, Perfetto or chrome://tracing."""

from pathlib import Path

import torch


class Profiler:
    """Runs torch's profiler and writes a compressed trace to a directory that the operator chose."""

    def __init__(self, directory: str) -> None:
        """``directory`` is made when it is needed; empty: profiling is refused."""
        self._directory = directory
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start to record, which makes steps slower. Raises ``ValueError`` if profiling is off or already recording."""
        if not self._directory:
            raise ValueError("profiling is off: the engine was started without profiler_dir")
        if self._profile is not None:
            raise ValueError("a profile is being recorded already")
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        write = torch.profiler.tensorboard_trace_handler(self._directory, use_gzip=True)
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
