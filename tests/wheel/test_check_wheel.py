"""What `make wheel-check` measures with."""

import os
import platform
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.wheel.check_wheel import held_levels, newest_wheel
from tests.wheel.family import cpu_seconds
from tokenloom.gpu_worker.kernels.levels import LEVELS
from tokenloom.gpu_worker.kernels.prebuilt import library_name, variants

SPIN = "import time\nwhile time.process_time() < {seconds}: pass\n"
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {SPIN.format(seconds=0.2)!r}], check=True)
running = subprocess.Popen([sys.executable, "-c", {SPIN.format(seconds=0.2)!r} + "print(flush=True); input()"])
running.wait()
"""


def test_the_time_of_a_family_counts_children_that_run_and_that_have_ended() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], **pipes) as parent:  # type: ignore[call-overload]
        parent.stdout.readline()  # the second child has used its time, and waits
        # Linux counts in hundredths, and drops the rest of each process.
        assert 0.38 <= cpu_seconds(parent.pid) < 60
        parent.stdin.close()


def test_the_newest_wheel_is_taken(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make wheel` first"):
        newest_wheel(tmp_path)
    for version, age in (("0.2.0", 60), ("0.1.0", 0)):
        wheel = tmp_path / f"tokenloom-{version}-py3-none-manylinux_2_28_{platform.machine()}.whl"
        wheel.touch()
        os.utime(wheel, (time.time() - age,) * 2)
    (tmp_path / "tokenloom-0.1.0-py3-none-manylinux_2_28_other.whl").touch()
    assert newest_wheel(tmp_path).name == f"tokenloom-0.1.0-py3-none-manylinux_2_28_{platform.machine()}.whl"


def test_a_level_is_held_only_with_every_kernel_of_the_present_sources(tmp_path: Path) -> None:
    wheel, best, other = tmp_path / "w.whl", LEVELS[0], LEVELS[-1]
    whole = [f"{best.name}/{library_name(*each, best)}" for each in variants()]
    parts = [f"{other.name}/{library_name(*each, other)}" for each in variants()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*whole, *parts[1:], f"{other.name}/fused-0123456789abcdef.so"):
            archive.writestr(f"tokenloom/gpu_worker/kernels/prebuilt/{name}", b"")
    assert held_levels(wheel) == [best.name]
