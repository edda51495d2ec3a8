"""What is made of the processor time of a mesh without requests; `tests/e2e/test_idle.py` runs one."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenloom.bench.mesh import idle
from tokenloom.bench.mesh.idle import IdleCase, summarize, table
from tokenloom.bench.mesh.mesh import mesh_options
from tokenloom.cli.main import app
from tokenloom.model_files.model_path import DEMO_MODEL


def test_each_part_is_held_to_the_limit() -> None:
    report = summarize({"gateway-0": 0.05, "engine-0": 0.2, "engine-1": 0.19}, 10.0)
    assert report["cores"] == {"gateway-0": 0.005, "engine-0": 0.02, "engine-1": 0.019}
    assert report["all"] == pytest.approx(0.044)
    assert report["busy"] == ["engine-0"]
    assert table(report).row_count == 4


def test_the_mesh_has_the_engines_of_the_case() -> None:
    options = mesh_options(DEMO_MODEL, IdleCase(prefill=1, decode=2).mesh)
    assert options.engine_roles == ["prefill", "decode", "decode"]
    assert mesh_options(DEMO_MODEL, IdleCase().mesh).engine_roles == ["both"]


@pytest.mark.parametrize(("used", "status"), [(0.05, 0), (5.0, 1)])
def test_the_command_fails_when_a_part_is_busy(monkeypatch: pytest.MonkeyPatch, used: float, status: int) -> None:
    cases: list[IdleCase] = []

    async def run_idle(model: Path, case: IdleCase) -> dict[str, Any]:
        cases.append(case)
        return summarize({"gateway-0": used}, case.seconds)

    monkeypatch.setattr(idle, "run_idle", run_idle)
    flags = ["--idle", "--seconds", "4", "--prefill", "1", "--decode", "1", "--json"]
    result = CliRunner().invoke(app, ["bench", "mesh", *flags])
    assert result.exit_code == status
    assert json.loads(result.stdout)["cores"] == {"gateway-0": used / 4}
    assert cases == [IdleCase(4.0, 1, 1)]
