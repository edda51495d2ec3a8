"""The presets of campaigns."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.chaos.campaign.layouts import Layout, Media, layouts_of, media_of
from benchmarks.chaos.campaign.options import CAMPAIGNS, ChaosOptions
from benchmarks.chaos.campaign.run import run_campaign
from benchmarks.chaos.faults.fault import SPLIT, WHOLE


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_every_campaign_meets_something_in_every_layout(name: str) -> None:
    campaign = CAMPAIGNS[name]
    for layout in (WHOLE, SPLIT):
        kinds = campaign.kinds(layout, ())
        assert kinds
        assert not any(action.is_of_link and kind.process for action in campaign.actions for kind in kinds)


def test_only_the_named_kinds() -> None:
    names = [kind.name for kind in CAMPAIGNS["kill"].kinds(WHOLE, ("worker", "gateway"))]
    assert names == ["gateway", "worker"]


def test_layouts() -> None:
    whole, split = layouts_of(ChaosOptions())
    assert whole.mesh.engine_roles == ["both"] * 2
    assert split.mesh.engine_roles == ["prefill"] * 2 + ["decode"] * 2
    (only,) = layouts_of(ChaosOptions(layout="split", worker="hash", parts=3))
    assert only.mesh.decode == 3
    assert "hash" in only.mesh.flags["engine"]


async def test_only_a_mesh_that_lacks_processors_refuses_no_request_as_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let wait everywhere, requests that a gateway refuses without cause showed in no campaign."""
    flags: list[str] = []

    async def run(layout: Layout, *_: object, **__: object) -> None:
        flags.extend(layout.mesh.flags["gateway"])

    monkeypatch.setattr("benchmarks.chaos.campaign.run.run_layout", run)
    patient = set()
    for name, campaign in CAMPAIGNS.items():
        flags.clear()
        await run_campaign(name, campaign, replace(campaign.options, layout="whole"), print, print)
        patient |= {name} if "--max-queue-seconds" in flags else set()
    assert patient == {"pause", "stutter"}


def test_a_slow_network_has_no_shared_memory() -> None:
    (split,) = layouts_of(ChaosOptions(layout="split", link_delay=0.02, bfloat16=True))
    flags = " ".join(split.mesh.flags["engine"])
    assert "--kv-transports socket" in flags
    assert "--dtype bfloat16 --batch-invariant" in flags
    assert "--kv-transports" not in layouts_of(ChaosOptions(layout="split"))[0].mesh.flags["engine"]


@pytest.mark.parametrize(
    ("kind", "media", "layouts"),
    [("qwen2_audio", Media.SOUNDS, ["whole", "split"]), ("whisper", Media.TRANSCRIPTS, ["whole"])],
)
def test_a_model_that_hears_has_encoders_of_sounds(kind: str, media: Media, layouts: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert media_of(tmp_path) is media
    found = layouts_of(ChaosOptions(model=str(tmp_path)))
    assert [layout.name for layout in found] == layouts
    for layout in found:
        names = {each.name for each in layout.kinds}
        assert {"sound encoder", "sound decoder", "sound tower", "gateway", "tokenizer"} <= names
        assert ("renderer" in names) == (media is Media.SOUNDS)
