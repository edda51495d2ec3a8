"""``tokenloom plan`` without a mesh, and what it prints."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.cli.mesh.plan_run import PlanOutput
from tokenloom.planner.demand import Demand, PlannedRole
from tokenloom.planner.planner import Flip, Plan

PLAN = Plan(
    {PlannedRole.PREFILL: 2, PlannedRole.DECODE: 1},
    Demand(1.25, 0.5),
    {PlannedRole.PREFILL: 2, PlannedRole.DECODE: 1},
    (Flip("engine-decode-1", "", PlannedRole.PREFILL),),
    {"engine-prefill": 1, "engine-decode": 2},
)


def test_no_mesh_ends_with_status_1() -> None:
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 1
    assert "no mesh is running" in result.stderr


def test_a_plan_as_text_and_as_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    PlanOutput(False, None).show({"demo": PLAN})
    text = capsys.readouterr().out
    assert "demo: 2 prefill (of 2 wanted), 1 decode (of 1 wanted); demand 1.25 prefill, 0.50 decode" in text
    assert "engine-decode-1 becomes prefill" in text
    PlanOutput(True, None).show({"demo": PLAN})
    seen: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert seen["flips"] == [{"engine": "engine-decode-1", "role": "prefill"}]
    assert seen["replicas"] == {"engine-prefill": 1, "engine-decode": 2}


def test_a_wrong_address_for_metrics_is_named() -> None:
    result = CliRunner().invoke(app, ["plan", "--coordinator", "unix:/nothing", "--metrics", "here"])
    assert result.exit_code == 1
    assert "--metrics here" in result.stderr
