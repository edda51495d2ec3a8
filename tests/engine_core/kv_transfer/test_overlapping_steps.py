"""What a step in flight may not touch when KV moves: blocks that are freed, loaded or leased meanwhile."""

import random

import pytest

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.kv_pair import Engine, Pair
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens


def make_pair(**settings: object) -> Pair:
    settings = {"executor": "late", "copies_at_once": True, "caching": False, "budget": 8, **settings}
    return Pair(**settings)  # type: ignore[arg-type]


def finish(pair: Pair) -> None:
    pair.settle()
    for engine in pair.engines:
        check_idle(engine.core.scheduler)
    for request in pair.requests.values():
        expected = expected_tokens(request.prompt, request.max_tokens, VOCAB_SIZE)
        assert request.tokens == (expected[: len(request.tokens)] if request.is_aborted else expected)


def tokens_ready(engine: Engine, name: str) -> int:
    return engine.service.leases._by_request[name].tokens_ready


@pytest.mark.parametrize("executor", [name for name in EXECUTORS if name != "uniproc"])
def test_engines_that_move_kv_overlap_steps(executor: str) -> None:
    pair = make_pair(executor=executor)
    request = pair.add("a", [1] * 20, 6)
    most_in_flight = {engine.name: 0 for engine in pair.engines}
    while not request.is_done:
        pair.turn()
        for engine in pair.engines:
            most_in_flight[engine.name] = max(most_in_flight[engine.name], len(engine.core.steps_in_flight))
    assert set(most_in_flight.values()) == {1}, "besides the one that the latest turn ended"
    finish(pair)


def test_a_load_does_not_fill_a_block_that_a_step_in_flight_writes() -> None:
    pair = make_pair()
    writes = pair.add("writes", [3] * 24, 4, swap=True)
    pair.step(pair.decode)
    written = list(pair.decode.core.scheduler.requests["writes"].kv.block_ids)
    loads = pair.add("loads", [4] * 24, 4)
    while loads.finish_reason is not FinishReason.PREFILLED:
        pair.step(pair.prefill)
    pair.abort(writes)
    assert len(pair.decode.core.steps_in_flight) == 1
    pair.step(pair.decode)
    assert set(written) <= set(pair.decode.core.scheduler.requests["loads/decode"].kv.block_ids)
    finish(pair)


def test_a_load_whose_request_is_aborted_in_the_step_that_plans_it_starts_and_ends() -> None:
    pair = make_pair(copies_at_once=False)
    running = pair.add("runs", [3] * 24, 20, swap=True)
    loads = pair.add("loads", [4] * 24, 4)
    while loads.finish_reason is not FinishReason.PREFILLED:
        pair.step(pair.prefill)
    pair.step(pair.decode)
    loads.is_aborted = True
    pair.decode.core.step(lambda: ["loads/decode"])
    finish(pair)
    assert loads.num_verifies == 1, "the front hears of the load once"
    assert running.finish_reason is FinishReason.LENGTH


def test_tokens_are_ready_when_the_step_that_computes_them_has_ended() -> None:
    pair = make_pair(copies_at_once=False)
    pair.add("a", [1] * 20, 2)
    ready = []
    for _ in range(4):
        pair.step(pair.prefill)
        ready.append(tokens_ready(pair.prefill, "a"))
    assert ready == [0, 8, 16, 20]
    finish(pair)


def test_a_step_in_flight_makes_no_token_of_a_later_lease_ready() -> None:
    pair = make_pair(copies_at_once=False)
    pair.add("a", [1] * 20, 2)
    pair.step(pair.prefill)
    pair.prefill.core.reset_prefix_cache(preempt_running=True)
    pair.step(pair.prefill)
    assert tokens_ready(pair.prefill, "a") == 0, "the step that ended computed them in other blocks"
    pair.step(pair.prefill)
    assert tokens_ready(pair.prefill, "a") == 8
    finish(pair)


def test_a_request_preempted_with_a_token_in_flight_continues() -> None:
    pair = make_pair()
    request = pair.add("a", [1] * 20, 8)
    while not request.decode_added or len(request.tokens) < 3:
        pair.turn()
    assert pair.decode.core.scheduler.requests["a/decode"].num_output_placeholders
    pair.decode.core.reset_prefix_cache(preempt_running=True)
    finish(pair)
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("fault", ["copy_fails", "torn_copy", "lease_expires"])
def test_a_load_that_fails_while_a_later_step_is_in_flight_is_computed_instead(fault: str) -> None:
    kv = KVConfig(transports=("memory",), checksum=True, failpoints=(f"{fault}=1.0",))
    pair = make_pair(kvs=[kv, kv], caching=True)
    requests = [pair.add(f"r{n}", [n] * 20, 8, early=n % 2 == 0) for n in range(4)]
    finish(pair)
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert sum(pair.decode.stats.kv_recomputes.values()) == len(requests)


def test_a_failed_step_still_starts_the_loads_planned_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(copies_at_once=False)
    pair.add("runs", [3] * 24, 20, swap=True)
    loads = pair.add("loads", [4] * 24, 4)
    while loads.finish_reason is not FinishReason.PREFILLED:
        pair.step(pair.prefill)
    pair.step(pair.decode)
    worker = pair.decode.core.executor._worker  # type: ignore[attr-defined]

    def fail(scheduled: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(worker, "execute_model", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        pair.step(pair.decode)
    finish(pair)
    assert loads.finish_reason is FinishReason.LENGTH


def run_with_drafts(seed: int) -> tuple[int, int]:
    """Random requests over a pair whose steps overlap and verify drafts, of which some are aborted. Returns how many
    drafts were right, and how many blocks moved."""
    rng = random.Random(seed)
    pair = Pair(
        executor=rng.choice(("late", "threaded")),
        copies_at_once=rng.random() < 0.5,
        caching=rng.random() < 0.5,
        budget=rng.choice((8, 16, 64)),
        num_blocks=rng.choice((24, 64)),
        num_drafts=rng.choice((1, 3, 6)),
        draft_accuracy=rng.choice((0.3, 0.7, 1.0)),
        draft_model=rng.choice(("", "small")),
    )
    for engine in pair.engines:
        assert engine.core.scheduler.drafts is not None
        engine.core.scheduler.drafts.costs = None
    for index in range(8):
        prompt = [rng.randrange(3)] * rng.randint(1, 30)
        early, swap = rng.random() < 0.5, rng.random() < 0.3
        pair.add(f"r{index}", prompt, rng.randint(1, 30), early=early, swap=swap)
        for _ in range(rng.randrange(4)):
            pair.turn()
        if rng.random() < 0.2:
            pair.abort(rng.choice(list(pair.requests.values())))
    finish(pair)
    stats = [engine.stats.spec_decoding for engine in pair.engines]
    pair.shutdown()
    return sum(each.num_accepted_tokens for each in stats), sum(each.transport.num_blocks for each in pair.engines)


def test_drafts_of_overlapping_steps_beside_kv_that_moves() -> None:
    runs = [run_with_drafts(seed) for seed in range(24)]
    assert sum(right for right, _ in runs) > 200
    assert sum(moved for _, moved in runs) > 200
