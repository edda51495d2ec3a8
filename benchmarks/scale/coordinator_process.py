"""Runs a real coordinator in a process of its own, and reads what it uses."""

import re
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

_METRICS_SECONDS = 30.0
"""A process that is starved answers late."""


class Coordinator:
    """The process of a coordinator.

    Attributes:
        address: Where it listens.
    """

    def __init__(
        self, address: str, metrics: str, *flags: str, program: Sequence[str] = ("tokenloom.services.coordinator",)
    ) -> None:
        """``metrics``: where it shows its metrics, ``host:port``. ``flags``: further ones. ``program``: a module that
        runs it, and the module's own arguments."""
        self.address = address
        self._metrics = metrics
        self._command = (
            *(sys.executable, "-m", *program, "--listen", address, "--metrics-listen", metrics),
            *("--log-level", "error", *flags),
        )
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        self._shown = psutil.Process(self._process.pid)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False once it has ended, for whatever reason."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once, as a lost node does."""
        self._process.kill()
        self._process.wait()

    def cpu_seconds(self) -> float:
        times = self._shown.cpu_times()
        return float(times.user + times.system)

    def loop_seconds(self) -> float:
        """Return the processor time of the thread with the event loop: the others, of gRPC, run beside it."""
        (main,) = (each for each in self._shown.threads() if each.id == self._process.pid)
        return float(main.user_time + main.system_time)

    def loop_wait_seconds(self) -> float:
        """Return for how long that thread has waited for a core."""
        shown = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()
        return int(shown[1]) / 1e9

    def reports(self) -> int:
        """Return how many reports it has read. Raises ``OSError`` if it does not answer."""
        (value,) = re.findall(r"^tokenloom_reports_read (\S+)$", self._page(), re.MULTILINE)
        return int(float(value))

    def pick_seconds(self) -> dict[float, float]:
        """Return how many picks of streams it has answered within some seconds each after it had read them. Raises
        ``OSError`` if it does not answer."""
        found = re.findall(r'^tokenloom_pick_seconds_bucket\{le="(\S+)"\} (\S+)$', self._page(), re.MULTILINE)
        return {float(bound): float(count) for bound, count in found}

    def _page(self) -> str:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=_METRICS_SECONDS) as page:
            return str(page.read().decode())

    def mebibytes(self) -> float:
        return float(self._shown.memory_info().rss) / 2**20
