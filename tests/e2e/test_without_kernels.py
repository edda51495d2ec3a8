"""An engine whose kernels cannot be compiled serves more slowly, and every place that shows fall-backs says why."""

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import COMMAND, Serve
from tokenloom.gpu_worker.kernels.levels import available_levels
from tokenloom.gpu_worker.kernels.prebuilt import FOLDER

REASON = "slow_kernels: g++ failed: cannot find cc1plus"

pytestmark = pytest.mark.skipif(
    any((FOLDER / level.name).is_dir() for level in available_levels()), reason="kernels were built ahead"
)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def test_a_compiler_that_fails_is_shown_everywhere(serve: Serve, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1 && exit\necho cannot find cc1plus >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    mesh = serve(PATH=f"{tmp_path}:/usr/bin:/bin", XDG_CACHE_HOME=str(tmp_path / "cache"))
    rows = {row["service"]: row for row in mesh.ps()}
    doctor = subprocess.run(
        (*COMMAND, "doctor", "--port", "0"),
        stdout=subprocess.PIPE,
        env={**mesh.environment, "COLUMNS": "1000"},  # so that no line is cut
        text=True,
        check=False,
    )
    health = json.loads(read(f"{mesh.url}/health"))
    assert f" Fall-back of engines: {REASON}. Ctrl-C stops it." in mesh.ready_line
    assert "fall-back slow_kernels: " in mesh.log.read_text()
    assert "cannot find cc1plus" in mesh.log.read_text()
    assert rows["engine"]["fall_backs"] == [REASON]
    assert f"fall-backs     engine-0 on port {mesh.url.rpartition(':')[2]}: {REASON}" in doctor.stdout
    assert "none built ahead and g++ fails (cannot find cc1plus)" in doctor.stdout
    assert health["status"] == "degraded"
    assert [each["kind"] for each in health["fall_backs"]] == ["slow_kernels"]
    metrics = read(f"http://{rows['engine']['metrics']}/metrics")
    assert 'tokenloom_fall_back_active{kind="slow_kernels",subject=""} 1.0' in metrics
