"""Recording what a worker computes, for TensorBoard, Perfetto or chrome://tracing."""

from pathlib import Path

import torch


class Profiler:
    """torch's profiler, writing a compressed trace to a directory that the operator chose."""

    def __init__(self, directory: str) -> None:
        """``directory``: made when it is needed; empty: profiling is refused."""
        self._directory = directory
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Records from here on, which makes steps slower. Raises ``ValueError`` when off, or recording already."""
        if not self._directory:
            raise ValueError("profiling is off: the engine was started without profiler_dir")
        if self._profile is not None:
            raise ValueError("a profile is being recorded already")
        Path(self._directory).mkdir(parents=True, exist_ok=True)
        write = torch.profiler.tensorboard_trace_handler(self._directory, use_gzip=True)
        self._profile = torch.profiler.profile(on_trace_ready=write)
        self._profile.start()

    def stop(self) -> None:
        """Writes what was recorded. Raises ``ValueError`` when nothing is."""
        if self._profile is None:
            raise ValueError("no profile is being recorded")
        profile, self._profile = self._profile, None
        profile.stop()

    def close(self) -> None:
        """Ends a recording, if there is one. Idempotent."""
        if self._profile is not None:
            self.stop()
