"""Short campaigns against real meshes of processes, whose engines have no model."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.chaos.campaign.options import CAMPAIGNS
from benchmarks.chaos.campaign.run import run_campaign
from benchmarks.chaos.clients import gateway_probe
from tests.checkpoints.whole_sound import write_whole_sound
from tests.checkpoints.whole_vision import write_whole_vision

SHORT: dict[str, Any] = {
    "worker": "hash",
    "each": 1,
    "cases": 11,
    "min_tokens": 60,
    "max_tokens": 120,
    "every": 1.5,
    "duration": 1.5,
}
BUSY: dict[str, Any] = {"max_added_p99": 30.0, "max_pause": None}
"""Limits of time for a machine that runs other tests too."""


async def campaign(name: str, **changes: Any) -> dict[str, Any]:
    preset = CAMPAIGNS[name]
    lines: list[str] = []
    options = replace(preset.options, **{**SHORT, **BUSY, **changes})
    report = await run_campaign(
        name, preset, options, lambda part, line: lines.append(f"{part} | {line}"), lines.append
    )
    report["log"] = lines
    return report


async def test_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a machine that runs other tests, a late answer is no sign of a lost gateway.
    monkeypatch.setattr(gateway_probe, "TIMEOUT_SECONDS", 30.0)
    report = await campaign("kill", layout="whole", requests=60, drafts=4)
    assert report["violations"] == [], "\n".join([*report["layouts"][0]["examples"], *report["log"][-60:]])


async def test_pauses_of_the_whole_mesh() -> None:
    report = await campaign("pause", layout="split", worker="hash", requests=60, each=2, hold_connections=True)
    (layout,) = report["layouts"]
    assert report["violations"] == [], "\n".join([*layout["examples"], *report["log"][-60:]])
    assert all("processes were stopped" in fault["effect"] for fault in layout["faults"])


async def test_parts_that_stutter() -> None:
    few = {"requests": 60, "each": 2, "duration": 10.0}
    report = await campaign("stutter", layout="split", hold_connections=True, **few)
    (layout,) = report["layouts"]
    assert report["violations"] == [], "\n".join([*layout["examples"], *report["log"][-60:]])
    assert sum("processes were stopped" in fault["effect"] for fault in layout["faults"]) == 2


async def test_kills_of_a_mesh_that_reads_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gateway_probe, "TIMEOUT_SECONDS", 30.0)
    model = str(write_whole_vision("llava", tmp_path))
    kinds = ("image encoder", "image tower", "engine")
    report = await campaign("kill", layout="whole", model=model, requests=40, cases=16, kinds=kinds)
    (layout,) = report["layouts"]
    assert report["violations"] == [], "\n".join([*layout["examples"], *report["log"][-60:]])
    assert {"kill image encoder", "kill image tower", "kill engine"} <= {row["kind"] for row in layout["rows"]}


@pytest.mark.parametrize("kind", ["qwen2_audio", "whisper"])
async def test_kills_of_a_mesh_that_hears(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gateway_probe, "TIMEOUT_SECONDS", 30.0)
    model = str(write_whole_sound(kind, tmp_path))
    kinds = ("sound encoder", "sound tower", "engine")
    is_whisper = kind == "whisper"
    worker = "model" if is_whisper else "hash"  # the latter reads no rows beside prompts
    # Few requests and a long time for each: they go on until every part serves again, on a busy machine for minutes.
    few = {"requests": 10, "cases": 7 if is_whisper else 14, "timeout": 300.0}
    report = await campaign("kill", layout="whole", model=model, worker=worker, kinds=kinds, **few)
    (layout,) = report["layouts"]
    assert report["violations"] == [], "\n".join([*layout["examples"], *report["log"][-60:]])
    assert {"kill sound encoder", "kill sound tower", "kill engine"} <= {row["kind"] for row in layout["rows"]}
