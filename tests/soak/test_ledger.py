"""A few faults of a kind that the seed draws; ``make soak`` runs 100 of each."""

import time

from tests.soak import ledger

SECONDS_OF_DAY = 86400


def test_a_mesh_holds_what_it_held_before_faults() -> None:
    seed = int(time.time() // SECONDS_OF_DAY)  # each day samples another kind
    assert ledger.run(seed, 2, 1, ledger.TRANSPORTS[seed % 2 :][:1], warm_up=1), f"seed {seed}"


def test_what_changed_is_named() -> None:
    before, after = {"a threads": 1, "b threads": 2}, {"a threads": 1, "b threads": 3, "c threads": 4}
    assert ledger.difference(before, after) == {"b threads": (2, 3), "c threads": (0, 4)}
