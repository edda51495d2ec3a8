import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_core, make_request, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.data.model_info import MediaTraits
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_row import hash_pooling
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


def test_ready_reports_the_sizes_of_the_core() -> None:
    ready = make_core(num_blocks=10, block_size=4).ready
    assert ready == CoreReady(
        num_kv_blocks=10,
        max_model_len=40,
        vocab_size=VOCAB_SIZE,
        block_size=4,
        kv_layout="hash/int32/2/4",
        numerics="hash",
        hidden_size=8,
        pooling=hash_pooling(generates=True),
        media=MediaTraits(("image", "audio", "video")),
    )


def test_memory_settles_the_pool() -> None:
    assert make_core(num_blocks=None, block_size=16, max_num_seqs=3).ready.num_kv_blocks == 3 * 256 // 16


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 256), (30, 256), (200, 8), (24, 9)])
def test_tokens_are_those_of_the_prefix(caching: bool, num_blocks: int, budget: int) -> None:
    core = make_core(num_blocks=num_blocks, budget=budget, beside_decode=budget // 2, caching=caching)
    prompts = {f"r{n}": [7] * (n % 5 * 4) + list(range(n % 11 + 1)) for n in range(40)}
    for request_id, prompt in prompts.items():
        core.add_request(make_request(request_id, prompt, 5 + len(prompt)))
    outputs = finish(core)
    for request_id, prompt in prompts.items():
        assert tokens_of(outputs[request_id]) == expected_tokens(prompt, 5 + len(prompt), VOCAB_SIZE)
        assert outputs[request_id][-1].finish_reason is FinishReason.LENGTH
    check_idle(core.scheduler)
    stats = core.scheduler.stats()
    assert (stats.num_preemptions > 0) == (num_blocks <= 30)
    assert (stats.prefix_cache_hits > 0) == caching


def test_an_attempt_continues_where_the_last_one_ended() -> None:
    expected = expected_tokens([1, 2, 3], 10, VOCAB_SIZE)
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3], 10, accepted=expected[:4]))
    outputs = finish(core)["a"]
    assert tokens_of(outputs) == expected[4:]
    assert [output.token_index for output in outputs] == [4, 5, 6, 7, 8, 9]


def test_a_step_carries_counts_and_statistics() -> None:
    core = make_core(num_blocks=8)
    core.add_request(make_request("a", [1] * 8, 2))
    outputs = core.step()
    assert outputs.step == 1
    assert outputs.scheduler_stats is not None
    assert (outputs.scheduler_stats.num_running, outputs.scheduler_stats.num_free_blocks) == (1, 6)
    assert outputs.scheduler_stats.kv_usage == 0.25
    outputs = core.step()
    assert outputs.scheduler_stats is not None
    assert (outputs.step, outputs.scheduler_stats.kv_usage) == (2, 0.0)


def test_a_refusal_is_a_step_without_work() -> None:
    core = make_core()
    core.add_request(make_request("a", []))
    assert core.has_work()
    outputs = core.step()
    assert (outputs.step, outputs.outputs[0].error) == (0, "prompt is empty")
    assert not core.has_work()


def test_a_live_id_is_not_taken_twice() -> None:
    core = make_core()
    core.add_request(make_request("a", [1]))
    with pytest.raises(AssertionError, match="request a is live already"):
        core.add_request(make_request("a", [1]))


def test_an_id_is_free_again_when_its_request_ended() -> None:
    core = make_core()
    for _ in range(2):
        core.add_request(make_request("a", [1], 3))
        assert tokens_of(finish(core)["a"]) == expected_tokens([1], 3, VOCAB_SIZE)


class FailingWorker(HashWorker):
    """Fails in its second step."""

    num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            raise RuntimeError("the device is gone")
        super().execute_model(scheduler_output)


def test_a_failed_step_is_raised_and_can_be_run_again() -> None:
    config = make_config()
    core = EngineCore(config, UniProcExecutor(FailingWorker(config, vocab_size=VOCAB_SIZE)))
    core.add_request(make_request("a", [1] * 9, 4))
    first = core.step().outputs
    core.add_request(make_request("b", [1] * 9, 4))
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    outputs = finish(core)
    expected = expected_tokens([1] * 9, 4, VOCAB_SIZE)
    assert tokens_of(first + outputs["a"]) == tokens_of(outputs["b"]) == expected
    check_idle(core.scheduler)


def test_resetting_the_prefix_cache() -> None:
    core = make_core()
    for hits in (0, 8, 8):
        core.add_request(make_request("a", [1] * 10))
        finish(core)
        assert core.scheduler.stats().prefix_cache_hits == hits
        if hits == 8:
            assert core.reset_prefix_cache()


def test_shutdown_twice() -> None:
    core = make_core()
    core.shutdown()
    core.shutdown()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"budget": 71}, "max_num_batched_tokens is 71.*at least max_num_seqs 8 [+] 64"),
        ({"budget": 128, "long_prefill": 64}, "long_prefill_token_threshold is 64.*above 64"),
    ],
)
def test_what_states_do_not_allow_is_refused_by_name(settings: dict[str, int], error: str) -> None:
    config = make_config(max_model_len=256, **settings)  # type: ignore[arg-type]
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=64)
    with pytest.raises(ValueError, match=error):
        EngineCore(config, UniProcExecutor(worker))
