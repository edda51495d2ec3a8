"""Injected faults: off by default, counted, deterministic."""

import pytest

from tokenloom.engine_core.kv_transfer.failpoints import FAILPOINTS, Failpoints


def test_nothing_fires_that_is_not_named() -> None:
    failpoints = Failpoints(["copy_fails"])
    assert not any(failpoints.fires(name) for name in FAILPOINTS if name != "copy_fails")
    assert failpoints.fires("copy_fails")
    assert failpoints.fired() == {"copy_fails": 1}


def test_a_share_of_the_times_is_the_same_for_a_seed() -> None:
    failpoints, again = (Failpoints(["torn_copy=0.3"], seed=7) for _ in range(2))
    fired = [failpoints.fires("torn_copy") for _ in range(1000)]
    assert fired == [again.fires("torn_copy") for _ in range(1000)]
    assert failpoints.fired() == {"torn_copy": sum(fired)}
    assert 250 < sum(fired) < 350


@pytest.mark.parametrize("spec", ["nonsense", "copy_fails=2", "copy_fails=x", "copy_fails=nan", ""])
def test_what_is_not_a_failpoint_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="failpoints: "):
        Failpoints([spec])
