"""Requests that go on at another engine while they generate have the tokens of one engine, and nothing is left."""

import random

import pytest

from tests.engine_core.helpers import VOCAB_SIZE
from tests.engine_core.kv_transfer.moving import Moving, MovingPair
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import ENDS_SOON
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

KV = KVConfig(transports=("memory",), checksum=True)


def pair_of(*failpoints: str, **settings: object) -> MovingPair:
    kv = KVConfig(transports=("memory",), checksum=True, failpoints=failpoints)
    return MovingPair(kvs=[kv, kv], **settings)


def run_until(pair: MovingPair, moving: Moving, num_tokens: int) -> None:
    while len(moving.tokens) < num_tokens:
        assert pair.turn()


def check(pair: MovingPair, chunk: int = 0) -> None:
    pair.settle()
    for moving in pair.moving.values():
        expected = expected_tokens(moving.prompt, moving.params.max_tokens, VOCAB_SIZE, state_chunk=chunk)
        assert (moving.tokens, moving.reason) == (expected, FinishReason.LENGTH)
    pair.shutdown()


@pytest.mark.parametrize("executor", ["uniproc", "threaded"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("length", [1, 5, 64, 130])
def test_moves_there_and_back(length: int, drafts: int, executor: str) -> None:
    pair = pair_of(num_drafts=drafts, executor=executor)
    moving = pair.begin("a", range(length), 80)
    for number, at in enumerate((3, 24, 47)):
        run_until(pair, moving, at)
        assert pair.move(moving, 1 - number % 2), moving.refusals
    check(pair)
    assert moving.num_moves == 3
    received = [engine.stats.kv_blocks_received for engine in pair.engines]
    assert min(received) > 0
    assert not any(engine.stats.kv_recomputes for engine in pair.engines)


@pytest.mark.parametrize("executor", ["uniproc", "threaded"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("chunk", [1, 6])
def test_a_state_moves_with_its_request(chunk: int, drafts: int, executor: str) -> None:
    settings = {"budget": 64, "num_blocks": 60, "block_size": 16, "max_num_seqs": 4, "num_drafts": drafts}
    pair = pair_of(state_chunk=chunk, num_slots=16, executor=executor, **settings)
    moving = pair.begin("a", range(70), 80)
    for number, at in enumerate((2, 25, 48)):
        run_until(pair, moving, at)
        computed = [engine.stats.num_computed_tokens for engine in pair.engines]
        assert pair.move(moving, 1 - number % 2), moving.refusals
        run_until(pair, moving, at + 20)
        computed = [engine.stats.num_computed_tokens - had for engine, had in zip(pair.engines, computed, strict=True)]
        assert sum(computed) < 70, "no engine computed the prompt again"
    check(pair, chunk)
    assert moving.num_moves == 3
    assert not any(engine.stats.kv_recomputes for engine in pair.engines)


@pytest.mark.parametrize("windows", [(None, 20), (None, 6, 40)])
@pytest.mark.parametrize("length", [3, 64, 100])
def test_windows_move_with_their_request(length: int, windows: tuple[int | None, ...]) -> None:
    pair = pair_of(windows=windows, num_blocks=300, block_size=4)
    moving = pair.begin("a", range(length), 90)
    for number, at in enumerate((2, 25, 48)):
        run_until(pair, moving, at)
        assert pair.move(moving, 1 - number % 2), moving.refusals
    check(pair)
    assert moving.num_moves == 3
    assert not any(engine.stats.kv_recomputes for engine in pair.engines)


def test_the_owner_generates_until_the_hand_over() -> None:
    """While nothing is copied, it goes on for the tokens that it promised, and not for one more."""
    pair = pair_of()
    moving = pair.begin("a", range(64), 60)
    run_until(pair, moving, 5)
    assert pair.move(moving, 1)
    for _ in range(30):
        pair.step(pair.engines[0])
    assert moving.num_moves == 1
    assert len(moving.tokens) == 5 + 8 + 69 // 4 // 8 + 1
    check(pair)


def test_a_request_that_ends_soon_stays() -> None:
    pair = pair_of()
    moving = pair.begin("a", range(10), 12)
    run_until(pair, moving, 3)
    assert not pair.move(moving, 1)
    assert moving.refusals == [ENDS_SOON]
    check(pair)


def test_a_request_moves_once_at_a_time() -> None:
    pair = pair_of()
    moving = pair.begin("a", range(10), 60)
    run_until(pair, moving, 3)
    assert pair.move(moving, 1)
    assert not pair.move(moving, 1)
    assert moving.refusals == ["another engine goes on with it already"]
    check(pair)
    assert moving.num_moves == 1


def test_what_waits_does_not_move() -> None:
    pair = pair_of(max_num_seqs=1)
    running, waiting = pair.begin("a", range(10), 40), pair.begin("b", range(20), 40)
    run_until(pair, running, 3)
    assert not pair.move(waiting, 1)
    assert waiting.refusals == ["it waits to run"]
    pair.engines[0].core.pause("keep")
    assert not pair.move(running, 1)
    assert running.refusals == ["the engine is paused"]
    pair.engines[0].core.resume()
    check(pair)


def test_the_requests_that_are_best_lent() -> None:
    pair = pair_of(max_num_seqs=5)
    lengths = {"a": (10, 80), "b": (100, 80), "c": (10, 60), "d": (10, 12), "e": (10, 80)}  # d ends soon
    moving = [pair.begin(name, range(length), tokens) for name, (length, tokens) in lengths.items()]
    moving.append(pair.begin("f", range(10), 80))  # waits for a seat
    for each in moving[:5]:
        run_until(pair, each, 3)

    def best(count: int, free_tokens: int = 1000, stay: str = "", *, before_preemption: bool = False) -> list[str]:
        scheduler = pair.engines[0].core.scheduler
        found = scheduler.requests_to_lend(count, free_tokens, stay.split(), before_preemption=before_preemption)
        return [name.partition("/")[0] for name in found]

    assert best(9) == ["e", "a", "c", "b"]
    assert best(9, before_preemption=True) == ["e", "c", "b", "a"], "the last one of those that run first"
    assert best(1, stay=moving[4].leg.name) == ["a"]
    # e and a have 13 tokens, and 21 when they have left: with the next one that is 6 blocks of 4 each.
    assert best(9, free_tokens=48) == ["e", "a"], "c has no room beside them"
    assert best(9, free_tokens=47) == ["e"], "a part of a block is a block"
    assert best(9, free_tokens=23) == []
    assert best(9, free_tokens=120, before_preemption=True)[:1] == ["e"]
    assert best(0) == best(9, free_tokens=0) == []
    assert pair.move(moving[0], 1)
    assert best(9) == ["e", "c", "b"], "a is lent already"
    check(pair)


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_move_that_is_called_off(chunk: int) -> None:
    settings = {"block_size": 16, "num_blocks": 40, "num_slots": 8} if chunk else {}
    pair = pair_of(state_chunk=chunk, **settings)
    moving = pair.begin("a", range(30), 80)
    for at in (3, 20, 41):
        run_until(pair, moving, at)
        assert pair.move(moving, 1)
        run_until(pair, moving, at + 4)
        pair.call_off(moving)
    check(pair, chunk)
    assert (moving.num_moves, moving.num_kept) == (0, 3)
    assert not pair.decode.stats.kv_recomputes, "nothing failed"


def test_a_move_that_is_called_off_too_late_is_one_to_anywhere() -> None:
    pair = pair_of()
    moving = pair.begin("a", range(30), 80)
    run_until(pair, moving, 3)
    assert pair.move(moving, 1)
    while moving.num_moves == 0:
        pair._drop_target(moving)  # the word that it stays is on its way
        pair.step(pair.engines[0])
    check(pair)
    assert moving.num_moves == 1


def test_preemption_ends_a_move_and_the_request_stays() -> None:
    pair = pair_of(num_blocks=40, max_num_seqs=4, watermark=0.0)
    requests = [pair.begin(name, range(index, index + 24), 60) for index, name in enumerate("abc")]
    for moving in requests:
        run_until(pair, moving, 3)
    while pair.prefill.core.scheduler.kv.pool.num_free > 4:
        pair.step(pair.engines[0])
    assert pair.move(requests[2], 1)
    for _ in range(20):
        pair.step(pair.engines[0])
    assert pair.prefill.stats.num_preemptions
    assert (requests[2].num_moves, requests[2].num_kept) == (0, 1)
    check(pair)


def test_a_failed_step_ends_a_move() -> None:
    pair = pair_of()
    moving = pair.begin("a", range(24), 60)
    run_until(pair, moving, 5)
    assert pair.move(moving, 1)
    pair.turn()
    pair.engines[0].core._begin_anew()
    check(pair)
    assert (moving.num_moves, moving.num_kept) == (0, 1)


@pytest.mark.parametrize("failpoint", ["torn_copy=1", "blocks_reused=1", "lease_expires=1", "wrong_layout=1"])
def test_a_copy_that_fails_costs_a_recompute(failpoint: str) -> None:
    pair = pair_of(failpoint)
    moving = pair.begin("a", range(24), 60)
    run_until(pair, moving, 5)
    assert pair.move(moving, 1)
    check(pair)
    assert moving.num_moves == 1


def test_a_request_that_ends_while_it_moves() -> None:
    pair = pair_of()
    stop = expected_tokens(range(24), 12, VOCAB_SIZE)[-1]
    params = CoreSamplingParams(max_tokens=60, seed=0, stop_token_ids=(stop,))
    moving = pair.begin("a", range(24), params=params)
    run_until(pair, moving, 5)
    assert pair.move(moving, 1)
    pair.settle()
    assert (moving.reason, moving.num_moves) == (FinishReason.STOP, 0)
    assert not pair.decode.stats.kv_recomputes
    pair.shutdown()


def test_an_abort_while_it_moves_leaves_nothing() -> None:
    for turns in range(14):
        pair = pair_of()
        moving = pair.begin("a", range(24), 60)
        run_until(pair, moving, 5)
        assert pair.move(moving, 1)
        for _ in range(turns):
            pair.turn()
        for leg in {id(leg): leg for leg in (*moving.legs, moving.target) if leg is not None}.values():
            leg.decode.core.abort_requests([leg.name])
        moving.reason, moving.target = FinishReason.ABORT, None
        pair.settle()
        pair.shutdown()


@pytest.mark.parametrize("seed", range(30))
def test_random_moves(seed: int) -> None:
    """Six requests in pools that are too small for them, moved, kept and preempted at random."""
    draw = random.Random(seed)
    kinds = [{}, {"num_drafts": 2}, {"state_chunk": 1, "num_slots": 9, "block_size": 8}, {"windows": (None, 12)}]
    kind = kinds[seed % len(kinds)]
    settings = {"num_blocks": 60 if "windows" not in kind else 140, "max_num_seqs": 5, "budget": 32} | kind
    pair = pair_of(*(["slow_copy"] if seed % 5 == 0 else []), executor=draw.choice(["uniproc", "threaded"]), **settings)
    requests = [
        pair.begin(f"r{index}", [draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 60))], 50, at=index % 2)
        for index in range(6)
    ]
    for _ in range(3000):
        if all(moving.is_done for moving in requests):
            break
        moving = draw.choice(requests)
        chance = draw.random()
        if not moving.is_done and chance < 0.2 and moving.target is None:
            pair.move(moving, draw.randrange(2) if chance < 0.02 else 1 - pair.engines.index(moving.leg.decode))
        elif not moving.is_done and chance < 0.24 and moving.target is not None:
            pair.call_off(moving)
        engine = draw.choice(pair.engines)
        draw.choice([pair.step, pair.step, pair.pump, lambda engine: engine.copies.run_one()])(engine)
        pair.clock.now += 0.01
    check(pair, kind.get("state_chunk", 0))
    assert sum(moving.num_moves for moving in requests)
