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


def is_replaced(name: str, kind: str, *, has_more: bool = True) -> bool:
    return ledger._is_replaced(name, kind, has_more=has_more)


def test_only_what_was_killed_is_left_out() -> None:
    together = "kill engine-1, tokenizer-0, output_processor-0"
    assert is_replaced("tokenizer-0 threads", together)
    assert is_replaced("engine-1 core_main threads", "kill the core of engine-1")
    assert is_replaced("tokenizer-1 render_worker threads", "kill render_worker")
    assert not is_replaced("tokenizer-1 threads", together)
    assert not is_replaced("tokenizer-1 threads", "kill render_worker")
    assert not is_replaced("engine-1 threads", "stop engine-1, tokenizer-0")


def test_more_processes_than_were_killed_are_not_left_out() -> None:
    name = "tokenizer-1 render_worker processes"
    assert is_replaced(name, "kill render_worker", has_more=False)
    assert not is_replaced(name, "kill render_worker")
    assert not is_replaced("engine-1 core_main processes", "kill engine-1")
