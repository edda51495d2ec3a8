"""Prefill on one core, decode on another: what happens on the way never changes a token."""

import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_core, make_request, tokens_of
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.kv_pair import Pair, PairRequest
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.data.messages import AcceptTokens, FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

KV = KVConfig(transports=("memory",), checksum=True)


def make_pair(*failpoints: str, decode: tuple[str, ...] = (), policy: str = "recompute", **settings: object) -> Pair:
    kvs = [
        KVConfig(transports=("memory",), checksum=True, failpoints=points, policy=policy)
        for points in (failpoints, decode)
    ]
    return Pair(kvs=kvs, **settings)


def check_done(pair: Pair, *requests: PairRequest) -> None:
    """All ended with the tokens of one engine, and nothing is left anywhere."""
    pair.settle()
    for request in requests:
        assert request.tokens == expected_tokens(request.prompt, request.max_tokens, VOCAB_SIZE)
        assert request.finish_reason is FinishReason.LENGTH
    for engine in pair.engines:
        check_idle(engine.core.scheduler)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 63, 64, 65, 130])
@pytest.mark.parametrize("early", [False, True])
def test_the_second_engine_goes_on_with_the_tokens_of_one(length: int, early: bool) -> None:
    pair = Pair()
    request = pair.add("a", range(length), early=early)
    check_done(pair, request)
    assert pair.decode.stats.kv_blocks_received == pair.decode.transport.num_blocks == -(-length // 4)
    assert pair.decode.stats.kv_bytes_received == {"memory": 32 * -(-length // 4)}
    assert not pair.decode.stats.kv_recomputes
    assert request.num_verifies == 1


def test_blocks_move_while_the_rest_is_computed() -> None:
    pair = Pair(budget=16)
    request = pair.add("a", range(64), early=True)
    pair.step(pair.prefill)
    assert request.decode_added
    assert request.finish_reason is None
    pair.pump(pair.prefill)
    pair.step(pair.decode)
    pair.pump(pair.decode)
    assert pair.decode.copies.run_one()
    assert pair.decode.transport.num_blocks == 4
    check_done(pair, request)
    assert pair.decode.transport.num_reads > 2
    assert pair.decode.transport.num_blocks == 16


def test_only_blocks_that_are_missing_move() -> None:
    pair = Pair()
    check_done(pair, pair.add("a", range(40)))
    moved = pair.decode.transport.num_blocks
    again = pair.add("b", [*range(40), 7, 7, 7])
    check_done(pair, again)
    assert pair.decode.transport.num_blocks - moved == 1
    assert pair.decode.stats.prefix_cache_hits == 40


def test_a_prompt_found_here_is_not_copied_and_its_lease_is_released() -> None:
    pair = Pair()
    check_done(pair, pair.add("a", range(40)))
    moved = pair.decode.transport.num_blocks
    again = pair.add("b", range(40))
    check_done(pair, again)
    assert pair.decode.transport.num_blocks == moved
    assert again.num_verifies == 1


def test_requests_of_other_salts_do_not_share_what_was_received() -> None:
    pair = Pair()
    check_done(pair, pair.add("a", range(40), salt=b"x"))
    check_done(pair, pair.add("b", range(40), salt=b"y"))
    assert pair.decode.transport.num_blocks == 20


def test_a_request_that_ends_with_its_first_token_has_no_second_leg() -> None:
    pair = Pair()
    request = pair.add("a", range(9), max_tokens=1)
    check_done(pair, request)
    assert not request.decode_added


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_lease_that_ends_with_its_request_is_no_failure(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, aborted = make_pair(policy=policy, budget=16), list[str]()
    first = expected_tokens(range(40), 1, VOCAB_SIZE)
    with monkeypatch.context() as patch:  # the reader learns of the lease before the abort of its leg arrives
        patch.setattr(pair.decode.core, "abort_requests", aborted.extend)
        request = pair.add("a", range(40), early=True, stop=tuple(first))
        for _ in range(20):
            pair.turn()
    assert aborted == ["a/decode"]
    assert (request.tokens, request.finish_reason, request.error) == (first, FinishReason.STOP, "")
    assert pair.decode.stats.kv_recomputes == {}
    pair.decode.core.abort_requests(aborted)
    pair.settle()
    for engine in pair.engines:
        check_idle(engine.core.scheduler)


def test_a_request_of_one_token_has_no_lease() -> None:
    pair = Pair(budget=16)
    request = pair.add("a", range(40), max_tokens=1, early=True)
    pair.step(pair.prefill)
    assert pair.prefill.stats.num_leases == 0
    check_done(pair, request)
    assert not request.decode_added


def test_a_core_that_waits_for_blocks_has_no_work() -> None:
    pair = Pair()
    request = pair.add("a", range(9))
    while not request.decode_added:
        pair.step(pair.prefill)
    assert pair.step(pair.decode)
    assert not pair.step(pair.decode)
    assert pair.decode.core.has_requests()
    check_done(pair, request)


@pytest.mark.parametrize(
    ("owner", "reader", "reason"),
    [
        (("lease_expires",), (), "lease_expired"),
        ((), ("copy_fails",), "transport"),
        ((), ("torn_copy",), "checksum"),
        ((), ("verdict_lost",), "timeout"),
    ],
)
def test_a_load_that_fails_is_counted_and_computed_here(
    owner: tuple[str, ...], reader: tuple[str, ...], reason: str
) -> None:
    pair = make_pair(*owner, decode=reader)
    check_done(pair, pair.add("a", range(30)), pair.add("b", range(50, 63), early=True))
    assert pair.decode.stats.kv_recomputes == {reason: 2}
    assert not pair.decode.stats.kv_blocks_received
    fired = pair.prefill.core.failpoints_fired() | pair.decode.core.failpoints_fired()
    assert fired[(*owner, *reader)[0]] == 2


def test_a_failed_load_ends_the_request_under_the_policy_fail() -> None:
    pair = make_pair(decode=("copy_fails",), policy="fail")
    request = pair.add("a", range(30))
    pair.settle()
    assert request.finish_reason is FinishReason.ERROR
    assert request.error.endswith(": transport")
    for engine in pair.engines:
        check_idle(engine.core.scheduler)


def test_blocks_that_were_written_over_during_the_copy_do_not_count() -> None:
    pair = make_pair("blocks_reused", num_blocks=16)
    request = pair.add("a", range(30))
    while not request.decode_added:
        pair.step(pair.prefill)
    pair.add("b", range(100, 150), max_tokens=1)
    while pair.step(pair.prefill):
        pass
    check_done(pair, request)
    assert pair.decode.stats.kv_recomputes == {"generation_changed": 1}


def test_a_layout_that_differs_is_refused() -> None:
    pair = make_pair("wrong_layout")
    request = pair.add("a", range(30))
    check_done(pair, request)
    assert request.target is None
    assert not pair.decode.transport.num_reads


def test_a_verdict_asked_for_twice_is_the_same() -> None:
    pair = make_pair(decode=("verify_twice",))
    request = pair.add("a", range(30))
    check_done(pair, request)
    assert request.num_verifies == 2
    assert pair.decode.stats.kv_blocks_received == 8


def test_a_lease_that_nobody_takes_up_expires() -> None:
    pair = Pair()
    request = pair.add("a", range(30), max_tokens=9)
    request.is_aborted = True  # the second leg is never placed
    while pair.step(pair.prefill):
        pass
    assert pair.prefill.stats.num_leases == 1
    assert pair.prefill.stats.num_free_blocks == 64 - 8
    pair.clock.now += 29.9
    pair.turn()
    assert pair.prefill.stats.num_leases == 1
    pair.clock.now += 0.2
    pair.turn()
    pair.turn()
    check_idle(pair.prefill.core.scheduler)


def test_a_finished_prefill_that_is_aborted_drops_its_lease() -> None:
    pair = Pair()
    request = pair.add("a", range(30))
    request.is_aborted = True
    while pair.step(pair.prefill):
        pass
    pair.prefill.core.abort_requests(["a"])
    pair.turn()
    check_idle(pair.prefill.core.scheduler)


@pytest.mark.parametrize(("length", "max_tokens", "seconds"), [(20, 12, 0.0), (30, 1, 5.0)])
def test_the_oldest_lease_is_revoked_for_who_runs_and_in_time_for_who_waits(
    length: int, max_tokens: int, seconds: float
) -> None:
    pair = Pair(num_blocks=16)
    for index, name in enumerate("ab"):
        pair.add(name, range(32 * index, 32 * index + 20)).is_aborted = True
        while pair.step(pair.prefill):
            pass
    core, prompt = pair.prefill.core, [90] * length
    core.add_request(make_request("c", prompt, max_tokens))
    outputs = finish(core).get("c", [])
    pair.pump(pair.prefill)
    assert bool(outputs) == (seconds == 0.0)
    pair.clock.now += seconds
    pair.pump(pair.prefill)
    assert tokens_of(outputs or finish(core)["c"]) == expected_tokens(prompt, max_tokens, VOCAB_SIZE)
    assert pair.prefill.stats.num_leases == 1
    pair.clock.now += 31.0
    pair.settle()
    check_idle(core.scheduler)


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("early", [False, True])
def test_an_abort_at_any_stage_leaves_nothing(turns: int, early: bool) -> None:
    pair = Pair(budget=16)
    request = pair.add("a", range(40), early=early)
    other = pair.add("b", range(7, 40))
    for _ in range(turns):
        pair.turn()
    pair.abort(request)
    check_done(pair, other)


def test_a_lost_owner_is_a_local_recompute_before_the_load_starts() -> None:
    pair = Pair(budget=16)
    request = pair.add("a", range(40), early=True)
    pair.step(pair.prefill)
    pair.prefill.service.leases.drop("a")
    pair.prefill.core.abort_requests(["a"])
    pair.pump(pair.prefill)  # the front hears of it, and tells the reader's KV thread before its core has begun
    assert request.target is not None
    pair.turn()
    pair.turn()
    assert pair.decode.stats.kv_recomputes == {"lease_revoked": 1}


@pytest.mark.parametrize("turns", range(6))
def test_accepted_tokens_that_end_the_request_end_it_wherever_it_is(turns: int) -> None:
    pair = Pair(budget=16)
    request = pair.add("a", range(40), early=True)
    pair.step(pair.prefill)
    for _ in range(turns):
        pair.step(pair.decode)
        pair.pump(pair.prefill)
        pair.pump(pair.decode)
        pair.decode.copies.run_one()
    pair.decode.core.scheduler.accept_tokens(AcceptTokens("a/decode", [1, 2, 3, 4, 5, 6]))
    outputs = [output for output in pair.decode.core.step().outputs if output.finish_reason is not None]
    assert [(output.finish_reason, output.token_index) for output in outputs] == [(FinishReason.LENGTH, 5)]
    pair.abort(request)
    pair.decode.core.scheduler.accept_tokens(AcceptTokens("a/decode", [1]))
    pair.settle()
    for engine in pair.engines:
        check_idle(engine.core.scheduler)


def test_a_failed_step_costs_waiting_requests_what_they_found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    check_done(pair, pair.add("a", range(40)))
    again = pair.add("b", [*range(40), 7, 7, 7])
    while not again.decode_added:
        pair.step(pair.prefill)
    pair.step(pair.decode)  # it found ten blocks, and waits for the last
    other = make_request("c/decode", [1, 2, 3])
    pair.requests["c"] = PairRequest("c", [1, 2, 3], 5, pair.prefill, pair.decode, is_early=False)
    pair.decode.core.add_request(other)
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.core.executor, "execute_model", fail)
        with pytest.raises(RuntimeError, match="lost"):
            pair.step(pair.decode)
    check_done(pair, again, pair.requests["c"])


def fail(scheduled: object) -> None:
    raise RuntimeError("the step is lost")


def test_cached_blocks_are_not_forgotten_while_a_request_relies_on_them() -> None:
    pair = Pair()
    request = pair.add("a", range(9))
    while not request.decode_added:
        pair.step(pair.prefill)
    pair.step(pair.decode)
    assert not pair.decode.core.reset_prefix_cache()
    check_done(pair, request)
    assert pair.decode.core.reset_prefix_cache()


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_paused_engine_serves_its_leases(mode: str) -> None:
    pair = Pair()
    request = pair.add("a", range(40))
    while not request.decode_added:
        pair.step(pair.prefill)
    assert pair.prefill.core.pause(mode).done()
    check_done(pair, request)
    assert pair.decode.stats.kv_blocks_received == 10


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_who_waits_for_blocks_in_a_pause_begins_after_it(mode: str) -> None:
    pair = Pair()
    request = pair.add("a", range(40))
    while not request.decode_added:
        pair.step(pair.prefill)
    pair.step(pair.decode)
    assert pair.decode.core.pause(mode).done()
    let_loads_end(pair)
    assert pair.decode.stats.kv_blocks_received == 10, "what was asked for before the pause still comes"
    assert request.tokens == expected_tokens(request.prompt, 1, VOCAB_SIZE)
    pair.decode.core.resume()
    check_done(pair, request)


@pytest.mark.parametrize("has_loaded", [False, True])
def test_loaded_blocks_are_forgotten_too_when_all_are(has_loaded: bool) -> None:
    pair = Pair()
    request = pair.add("a", range(40))
    while not request.decode_added:
        pair.step(pair.prefill)
    pair.step(pair.decode)
    pool = pair.decode.core.scheduler.kv.pool
    pair.decode.core.pause("keep")
    if has_loaded:
        let_loads_end(pair)
    assert pool.usage
    assert pair.decode.core.reset_prefix_cache(preempt_running=True)
    if not has_loaded:
        assert pool.usage, "the blocks are still written to"
        let_loads_end(pair)
    assert not pool.usage
    pair.decode.core.resume()
    check_done(pair, request)


def let_loads_end(pair: Pair) -> None:
    while pair.turn():
        pass


def test_an_engine_that_moves_no_kv_refuses_requests_that_need_it() -> None:
    core = make_core()
    message = make_request("a", [1, 2, 3])
    message.lease_id = b"lease"
    core.add_request(message)
    (output,) = core.step().outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "does not exchange KV" in output.error
