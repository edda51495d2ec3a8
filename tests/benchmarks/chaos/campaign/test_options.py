"""The presets of campaigns."""

import pytest

from benchmarks.chaos.campaign.layouts import layouts_of
from benchmarks.chaos.campaign.options import CAMPAIGNS, ChaosOptions
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
