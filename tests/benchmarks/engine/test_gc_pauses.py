"""`bench.gc_pauses` over a few steps."""

import gc

from tokenloom.bench.engine.gc_pauses import run_steps


def test_steps_and_collections_are_timed() -> None:
    before = list(gc.callbacks)
    report = run_steps(20, freeze=False)
    assert 0 < report["median_step_ms"] <= report["longest_step_ms"]
    assert gc.callbacks == before
