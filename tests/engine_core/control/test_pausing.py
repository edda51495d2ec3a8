import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_core, make_request, tokens_of
from tests.engine_core.invariants import check_scheduler
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.engine_core.scheduling.step_planner import PauseState


def busy_core(**settings: object) -> EngineCore:
    """Return a core in which ``a`` and ``b`` run and ``c`` waits for a place in the batch."""
    core = make_core(max_num_seqs=2, **settings)
    for name, prompt in (("a", [1]), ("b", [2]), ("c", [3])):
        core.add_request(make_request(name, prompt, 6))
    core.step()
    return core


def test_abort_ends_all_and_new_ones_queue() -> None:
    core = busy_core()
    assert core.pause("abort").done()
    assert core.scheduler.pause_state is PauseState.PAUSED_NEW
    core.add_request(make_request("new", [4], 2))
    outputs = finish(core)
    assert {name: output.finish_reason for name, (output,) in outputs.items()} == dict.fromkeys(
        "abc", FinishReason.ABORT
    )
    core.resume()
    assert tokens_of(finish(core)["new"]) == expected_tokens([4], 2, VOCAB_SIZE)


def test_wait_lets_running_requests_finish_and_no_other_begin() -> None:
    core = busy_core()
    quiet = core.pause("wait")
    assert not quiet.done()
    outputs = finish(core)
    assert quiet.done()
    assert sorted(outputs) == ["a", "b"]
    core.resume()
    assert tokens_of(finish(core)["c"]) == expected_tokens([3], 6, VOCAB_SIZE)


def test_a_preempted_request_has_begun() -> None:
    core = make_core(num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=16)
    for name in "ab":
        core.add_request(make_request(name, [ord(name)] * 4, 10))
    while not core.scheduler.stats().num_preemptions:
        core.step()
    quiet = core.pause("wait")
    core.add_request(make_request("new", [4], 2))
    assert sorted(finish(core)) == ["a", "b"]
    assert quiet.done()
    assert "new" in core.scheduler.requests


def test_a_wait_is_over_when_the_last_is_aborted() -> None:
    core = busy_core()
    quiet = core.pause("wait")
    core.abort_requests(["a", "b"])
    assert quiet.done()


def test_keep_freezes_everything() -> None:
    core = busy_core()
    assert core.pause("keep").done()
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    usage = core.scheduler.kv.pool.usage
    assert not finish(core)
    assert (len(core.scheduler.running), core.scheduler.kv.pool.usage) == (2, usage)
    core.abort_requests(["b"])
    check_scheduler(core.scheduler)
    core.resume()
    outputs = finish(core)
    assert sorted(outputs) == ["a", "c"]
    assert tokens_of(outputs["a"]) == expected_tokens([1], 6, VOCAB_SIZE)[1:]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_can_forget_the_cache(mode: str) -> None:
    core = busy_core(block_size=1)
    quiet = core.pause(mode, clear_cache=True)
    outputs = finish(core)
    assert quiet.done()
    assert not core.scheduler.kv.pool._by_hash
    core.resume()
    for name, rest in finish(core).items():
        outputs.setdefault(name, []).extend(rest)
    if mode != "abort":
        assert tokens_of(outputs["b"]) == expected_tokens([2], 6, VOCAB_SIZE)[1:]
        assert tokens_of(outputs["c"]) == expected_tokens([3], 6, VOCAB_SIZE)


def test_pausing_again_in_the_same_mode_is_no_error() -> None:
    core = busy_core()
    first = core.pause("wait")
    assert core.pause("wait") is first
    with pytest.raises(ValueError, match="paused in mode wait; resume it first"):
        core.pause("keep")
    with pytest.raises(ValueError, match="mode 'soft' is unknown; use one of abort, wait, keep"):
        core.pause("soft")


def test_a_pause_that_is_resumed_early_fails() -> None:
    core = busy_core()
    quiet = core.pause("wait")
    core.resume()
    with pytest.raises(ValueError, match="resumed before all requests had finished"):
        quiet.result(0)
    assert sorted(finish(core)) == ["a", "b", "c"]


def test_a_shutdown_ends_frozen_requests() -> None:
    core = busy_core()
    core.pausing.end_frozen()
    assert core.has_requests(), "it is not paused"
    core.pause("keep")
    core.pausing.end_frozen()
    assert not core.has_requests()
    assert {output.finish_reason for (output,) in finish(core).values()} == {FinishReason.ABORT}
