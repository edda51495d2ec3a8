"""The pieces of `bench speculation`, on the demo model and at a small size."""

import pytest

from tokenloom.bench.engine.speculation import SpeculationOptions, run_speculation, table
from tokenloom.gpu_worker import warm_up
from tokenloom.model_files.model_path import DEMO_MODEL


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "free_rows", lambda run, most: 16)
    rows = run_speculation(SpeculationOptions(DEMO_MODEL, num_drafts=6, num_tokens=40, rounds=1, threads=1))
    replayed, repeated, random_text, streams = rows
    assert 0.1 < replayed["accepted"] < 0.7
    assert replayed["tokens_per_step"] > 1.5
    assert repeated["tokens_per_step"] > 1.5
    # None: random text that is rarely repeated got no drafts at all.
    assert repeated["accepted"] > (random_text["accepted"] or 0.0)
    assert streams["accepted"] is None, "32 rows leave none to drafts"
    assert table(rows).row_count == 4
