from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.engine_core.executor.ranks import Ranks, make_ranked_core
from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_core, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_scheduler
from tests.engine_core.kv_transfer.kv_pair import Pair
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.core_calls import CoreCalls
from tokenloom.engine_core.data.errors import ExecutorFailedError, RanksDifferError
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


def pool_is_empty(core: EngineCore) -> bool:
    return not np.frombuffer(core.executor.kv_pool().memory.buffer, dtype=np.uint8).any()


def busy_core() -> EngineCore:
    """Return a core in which ``a`` and ``b`` run and ``c`` waits for a place in the batch."""
    core = make_core(max_num_seqs=2)
    for name, prompt in (("a", range(9)), ("b", [2]), ("c", [3])):
        core.add_request(make_request(name, prompt, 6))
    core.step()
    return core


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_the_cache_is_gone_after_waking(level: int) -> None:
    core = make_core()
    core.add_request(make_request("a", range(30)))
    finish(core)
    assert not pool_is_empty(core)
    assert core.sleeping.sleep(level).done()
    assert core.sleeping.is_sleeping()
    assert pool_is_empty(core)
    core.sleeping.wake_up()
    assert not core.sleeping.is_sleeping()
    hits = core.scheduler.stats().prefix_cache_hits
    core.add_request(make_request("b", range(30)))
    assert tokens_of(finish(core)["b"]) == expected_tokens(range(30), 5, VOCAB_SIZE)
    assert core.scheduler.stats().prefix_cache_hits == hits


def test_requests_that_come_while_it_sleeps_wait() -> None:
    core = make_core()
    core.sleeping.sleep()
    core.add_request(make_request("a", [1]))
    assert finish(core) == {}
    core.sleeping.wake_up()
    assert tokens_of(finish(core)["a"]) == expected_tokens([1], 5, VOCAB_SIZE)


def test_level_zero_only_pauses() -> None:
    core = busy_core()
    assert core.sleeping.sleep(0, "keep").done()
    assert finish(core) == {}
    assert not pool_is_empty(core)
    core.sleeping.wake_up()
    assert tokens_of(finish(core)["b"]) == expected_tokens([2], 6, VOCAB_SIZE)[1:]


def test_abort_ends_all_live_requests() -> None:
    core = busy_core()
    assert core.sleeping.sleep(1, "abort").done()
    assert {output.finish_reason for (output,) in finish(core).values()} == {FinishReason.ABORT}
    assert pool_is_empty(core)


def test_wait_lets_the_running_finish_first() -> None:
    core = busy_core()
    falling = core.sleeping.sleep(1, "wait")
    assert not falling.done()
    assert core.sleeping.sleep(1, "wait") is falling
    assert sorted(finish(core)) == ["a", "b"]
    assert falling.done()
    assert pool_is_empty(core)
    core.sleeping.wake_up()
    assert tokens_of(finish(core)["c"]) == expected_tokens([3], 6, VOCAB_SIZE)


def test_keep_computes_the_frozen_anew_after_waking() -> None:
    core = busy_core()
    assert core.sleeping.sleep(1, "keep").done()
    assert pool_is_empty(core)
    check_scheduler(core.scheduler)
    core.sleeping.wake_up()
    outputs = finish(core)
    assert tokens_of(outputs["a"]) == expected_tokens(range(9), 6, VOCAB_SIZE)[1:]
    assert tokens_of(outputs["c"]) == expected_tokens([3], 6, VOCAB_SIZE)


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_requests_continue_when_all_is_awake(order: Sequence[str]) -> None:
    core = make_core()
    core.sleeping.sleep()
    core.add_request(make_request("a", [1]))
    core.sleeping.wake_up([order[0]])
    core.sleeping.wake_up([order[0]])
    assert core.sleeping.is_sleeping()
    assert finish(core) == {}
    core.sleeping.wake_up([order[1]])
    assert tokens_of(finish(core)["a"]) == expected_tokens([1], 5, VOCAB_SIZE)


@pytest.mark.parametrize("order", [("weights", "reload", "kv_cache"), ("kv_cache", "weights", "reload")])
def test_level_two_wakes_in_vllms_order(order: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}}}')
    core = make_core()
    core.sleeping.sleep(2)
    for part in order:
        assert core.sleeping.is_sleeping()
        assert core.sleeping.calls_to_wake()
        if part == "reload":
            core.sleeping.reload_weights(str(tmp_path))
        else:
            core.sleeping.wake_up([part])
    core.sleeping.wake_up()
    assert not core.sleeping.is_sleeping()
    assert not core.sleeping.calls_to_wake()
    core.add_request(make_request("a", [1]))
    assert tokens_of(finish(core)["a"]) == expected_tokens([1], 5, VOCAB_SIZE)


def test_waking_before_the_last_has_finished_calls_it_off() -> None:
    core = busy_core()
    falling = core.sleeping.sleep(1, "wait")
    core.sleeping.wake_up()
    with pytest.raises(ValueError, match="woken up before it slept"):
        falling.result(timeout=0)
    assert sorted(finish(core)) == ["a", "b", "c"]


def test_unknown_levels_modes_and_tags_are_refused() -> None:
    core = make_core()
    core.sleeping.wake_up()
    with pytest.raises(ValueError, match="level 3 is unknown"):
        core.sleeping.sleep(3)
    with pytest.raises(ValueError, match="mode 'doze' is unknown"):
        core.sleeping.sleep(1, "doze")
    assert not core.sleeping.is_sleeping()
    core.sleeping.sleep(1)
    with pytest.raises(ValueError, match="sleeps at level 1"):
        core.sleeping.sleep(2)
    with pytest.raises(ValueError, match="tag 'dreams' is unknown"):
        core.sleeping.wake_up(["dreams"])
    with pytest.raises(ValueError, match="call wake_up first"):
        core.resume()


def test_leases_end_and_loads_in_flight_are_waited_for() -> None:
    pair = Pair()
    request = pair.add("a", range(30))
    while not pair.decode.copies.tasks:  # the prefill is done and leased, the decode engine about to copy
        pair.step(pair.prefill)
        pair.pump(pair.prefill)
        pair.step(pair.decode)
        pair.pump(pair.decode)
    assert pair.prefill.core.sleeping.sleep(1, "wait").done()
    assert pair.prefill.stats.num_leases == 0
    falling = pair.decode.core.sleeping.sleep(1, "wait")
    assert not falling.done(), "blocks are being written to"
    while not falling.done():
        pair.turn()
    for engine in pair.engines:
        assert pool_is_empty(engine.core)
        engine.core.sleeping.wake_up()
    pair.settle()
    assert request.tokens == expected_tokens(range(30), 5, VOCAB_SIZE)
    assert pair.decode.stats.kv_recomputes


def test_weights_are_replaced_only_while_no_request_runs(tmp_path: Path) -> None:
    core = busy_core()
    with pytest.raises(ValueError, match="requests are running"):
        core.sleeping.reload_weights(str(tmp_path))
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}}}')
    core.pause("keep")
    core.sleeping.reload_weights(str(tmp_path))
    core.resume()
    assert tokens_of(finish(core)["a"]) == expected_tokens(range(9), 6, VOCAB_SIZE)[1:]
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(ValueError, match="vocab_size is 5 in the checkpoint"):
        core.sleeping.reload_weights(str(tmp_path))


def test_weights_are_replaced_after_the_requests_that_a_pause_waits_for(tmp_path: Path) -> None:
    """With the new weights, which would have been loaded under them, their answers would be of both."""
    core = busy_core()
    quiet = core.pause("wait")
    with pytest.raises(ValueError, match="the pause waits for"):
        core.sleeping.reload_weights(make_weights(tmp_path))
    assert tokens_of(finish(core)["a"]) == expected_tokens(range(9), 6, VOCAB_SIZE)[1:]
    assert quiet.done()
    core.sleeping.reload_weights(make_weights(tmp_path))


def test_without_weights_after_a_failed_reload_it_sleeps_until_others_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = busy_core()
    core.pause("keep")
    (tmp_path / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}}}')
    with monkeypatch.context() as patch:
        patch.setattr(HashWorker, "reload_weights", fail_to_read)
        with pytest.raises(ExecutorFailedError, match="the disk failed; the engine has no weights now"):
            core.sleeping.reload_weights(str(tmp_path))
    assert core.sleeping.is_sleeping()
    with pytest.raises(ValueError, match="asleep"):
        core.resume()
    assert finish(core) == {}
    core.sleeping.reload_weights(str(tmp_path))
    core.sleeping.wake_up()
    assert not core.sleeping.is_sleeping()
    assert tokens_of(finish(core)["a"]) == expected_tokens(range(9), 6, VOCAB_SIZE)[1:]


def fail_to_read(worker: HashWorker, path: str) -> None:
    raise OSError("the disk failed")


def make_ranks() -> tuple[EngineCore, Ranks]:
    config = make_config()
    return make_ranked_core(config, make_worker(config), make_worker(config))


def make_weights(directory: Path) -> str:
    (directory / "config.json").write_text(f'{{"vocab_size": {VOCAB_SIZE}}}')
    return str(directory)


def works(core: EngineCore) -> bool:
    core.add_request(make_request("works", [1]))
    return tokens_of(finish(core).get("works", [])) == expected_tokens([1], 5, VOCAB_SIZE)


def test_no_rank_replaces_its_weights_if_one_refuses_the_checkpoint(tmp_path: Path) -> None:
    core, ranks = make_ranks()
    ranks.failures[1, "check_weights"] = ValueError("no such directory on this node")
    with pytest.raises(RanksDifferError, match="worker 1: no such directory on this node"):
        core.sleeping.reload_weights(make_weights(tmp_path))
    assert not any("reload_weights" in made for made in ranks.made)
    assert not core.sleeping.is_sleeping()
    assert works(core)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [ValueError("the file changed"), ExecutorFailedError("no memory")])
def test_weights_that_only_some_ranks_replaced_are_lost(tmp_path: Path, rank: int, error: Exception) -> None:
    core, ranks = make_ranks()
    ranks.failures[rank, "reload_weights"] = error
    with pytest.raises(ExecutorFailedError, match=f"worker {rank}: .*; the engine has no weights now"):
        core.sleeping.reload_weights(make_weights(tmp_path))
    assert core.sleeping.is_sleeping()
    with pytest.raises(ValueError, match="the engine has no weights; call reload_weights"):
        core.sleeping.wake_up()
    assert not works(core)
    ranks.failures.clear()
    core.abort_requests(["works"])
    core.sleeping.reload_weights(make_weights(tmp_path))
    core.sleeping.wake_up()
    assert works(core)


def test_requests_of_an_engine_that_lost_its_weights_end_when_it_shuts_down(tmp_path: Path) -> None:
    core, ranks = make_ranks()
    ranks.failures[1, "reload_weights"] = ExecutorFailedError("no memory")
    with pytest.raises(ExecutorFailedError, match="no weights now"):
        core.sleeping.reload_weights(make_weights(tmp_path))
    assert not works(core)
    CoreCalls(core).refuse_new()
    assert not core.has_requests()


def test_an_interrupt_of_a_reload_loses_the_weights(tmp_path: Path) -> None:
    core, ranks = make_ranks()
    ranks.failures[1, "reload_weights"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        core.sleeping.reload_weights(make_weights(tmp_path))
    assert "no weights" in core.sleeping.calls_to_wake()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_sleep_that_fails_is_an_error_and_the_next_one_tries_again(rank: int, mode: str) -> None:
    core, ranks = make_ranks()
    ranks.failures[rank, "sleep"] = ExecutorFailedError("no space left on device")
    if mode == "wait":
        core.add_request(make_request("a", [1], 3))
        core.step()
    falling = core.sleeping.sleep(1, mode)
    finish(core)
    with pytest.raises(RanksDifferError, match="no space left on device"):
        falling.result(timeout=0)
    assert core.sleeping.is_sleeping(), "the other rank has released its memory"
    assert not works(core)
    core.abort_requests(["works"])
    with pytest.raises(RanksDifferError):
        core.sleeping.sleep(1, mode).result(timeout=0)
    ranks.failures.clear()
    assert core.sleeping.sleep(1, mode).result(timeout=0).kv_cache > 0
    assert core.sleeping.sleep(1, mode).result(timeout=0).kv_cache == 0
    core.sleeping.wake_up()
    assert works(core)


def test_after_a_sleep_that_failed_the_engine_can_wake_up() -> None:
    core, ranks = make_ranks()
    ranks.failures[1, "sleep"] = ExecutorFailedError("no space left on device")
    assert core.sleeping.sleep().exception(timeout=0)
    core.sleeping.wake_up()
    assert ["wake_up" in made for made in ranks.made] == [True, True]
    assert works(core)


def test_an_interrupt_ends_falling_asleep() -> None:
    core, ranks = make_ranks()
    core.add_request(make_request("a", [1], 2))
    core.step()
    falling = core.sleeping.sleep(1, "wait")
    ranks.failures[0, "sleep"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        finish(core)
    with pytest.raises(ExecutorFailedError, match="falling asleep was interrupted"):
        falling.result(timeout=0)
    ranks.failures.clear()
    assert core.sleeping.sleep(1, "wait").result(timeout=0).kv_cache > 0


def test_a_rank_that_does_not_wake_up_keeps_the_engine_asleep_until_it_does() -> None:
    core, ranks = make_ranks()
    core.sleeping.sleep()
    ranks.failures[1, "wake_up"] = ValueError("the files changed")
    with pytest.raises(RanksDifferError, match="worker 1: the files changed"):
        core.sleeping.wake_up()
    assert core.sleeping.is_sleeping()
    assert not works(core)
    core.abort_requests(["works"])
    assert core.sleeping.sleep().result(timeout=0).kv_cache > 0, "one rank was awake"
    ranks.failures.clear()
    core.sleeping.wake_up()
    assert works(core)


def test_an_engine_of_which_a_part_is_awake_can_sleep_again() -> None:
    core, ranks = make_ranks()
    core.sleeping.sleep()
    core.sleeping.wake_up(["kv_cache"])
    core.sleeping.sleep().result(timeout=0)
    assert ranks.made[0].count("sleep") == 2
    core.sleeping.wake_up(["kv_cache"])
    assert core.sleeping.is_sleeping()


def test_aborting_the_last_running_request_lets_the_engine_sleep() -> None:
    core = busy_core()
    falling = core.sleeping.sleep(1, "wait")
    core.abort_requests(["a", "b"])
    assert falling.done()
    assert pool_is_empty(core)
