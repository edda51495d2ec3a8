"""What an engine does beside computing prompts and tokens, with a layer that keeps a state: sleep, reset, sessions,
prompt embeddings and log probabilities of prompts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, tokens_of
from tests.engine_core.invariants import check_idle, check_scheduler
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE, HashWorker, expected_tokens
from tokenloom.engine_core.kv_cache.state_slots import StateSlotPool

MakeCore = Callable[..., EngineCore]
PROMPT = list(range(40))


@pytest.fixture(params=[1, 6])
def chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def core(chunk: int) -> EngineCore:
    config = make_config(budget=16, max_num_seqs=2)
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=chunk, state_bytes=10_000)
    return EngineCore(config, UniProcExecutor(worker))


def states_of(core: EngineCore) -> StateSlotPool:
    assert core.scheduler.kv.states is not None
    return core.scheduler.kv.states


def wanted(prompt: list[int], chunk: int, count: int = 5) -> list[int]:
    return expected_tokens(prompt, count, VOCAB_SIZE, state_chunk=chunk)


@pytest.mark.parametrize("level", [1, 2])
def test_no_state_is_found_after_sleep(core: EngineCore, chunk: int, level: int) -> None:
    core.add_request(make_request("a", PROMPT))
    finish(core)
    assert states_of(core).pool._by_hash
    core.sleeping.sleep(level)
    core.sleeping.wake_up()
    assert not states_of(core).pool._by_hash
    core.add_request(make_request("b", PROMPT))
    assert tokens_of(finish(core)["b"]) == wanted(PROMPT, chunk)
    assert core.scheduler.stats().prefix_cache_hits == 0
    check_idle(core.scheduler)


def test_a_reset_lets_requests_begin_again(core: EngineCore, chunk: int) -> None:
    core.add_request(make_request("a", PROMPT, 9))
    outputs = [output for _ in range(6) for output in core.step().outputs]
    assert core.reset_prefix_cache(preempt_running=True)
    check_scheduler(core.scheduler)
    assert not states_of(core).pool._by_hash
    outputs += finish(core)["a"]
    assert tokens_of(outputs) == wanted(PROMPT, chunk, 9)
    core.add_request(make_request("b", PROMPT))
    assert tokens_of(finish(core)["b"]) == wanted(PROMPT, chunk)
    check_idle(core.scheduler)


def test_turns_of_a_session_go_on_from_a_state(core: EngineCore, chunk: int) -> None:
    spoken: list[int] = []
    for turn in range(3):
        message = make_request("s", range(turn, turn + 20), 4)
        message.resumable = True
        spoken += message.prompt_token_ids
        core.add_request(message)
        tokens = tokens_of(finish(core)["s"])
        assert tokens == wanted(spoken, chunk, 4)
        spoken += tokens[:-1]  # the last token of a turn was not computed and is not kept
    assert core.scheduler.stats().prefix_cache_hits > 0


def test_prompt_embeddings_are_part_of_a_state(core: EngineCore, chunk: int) -> None:
    rows = [np.full((6, HIDDEN_SIZE), number, np.float32) for number in (1, 2, 1)]
    for name, values in zip("abc", rows, strict=True):
        message = make_request(name, PROMPT)
        message.prompt_embeds = [EmbedsSpan(12, values)]  # a chunk ends before them
        core.add_request(message)
        hashed = [*PROMPT[:12], *embeds_ids(EmbedsSpan(12, values)), *PROMPT[18:]]
        assert tokens_of(finish(core)[name]) == wanted(hashed, chunk)
    assert core.scheduler.stats().prefix_cache_hits > 0, "the third one is the first one again"


def test_log_probabilities_of_a_prompt_are_computed_from_its_beginning(core: EngineCore, chunk: int) -> None:
    answers = []
    for name in "ab":
        message = make_request(name, PROMPT)
        message.sampling_params = replace(message.sampling_params, prompt_logprobs=1)
        core.add_request(message)
        outputs = finish(core)[name]
        assert tokens_of(outputs) == wanted(PROMPT, chunk)
        [logprobs] = [each.new_prompt_logprobs for each in outputs if each.new_prompt_logprobs is not None]
        answers.append(logprobs.sampled)
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(PROMPT) - 1
    assert core.scheduler.stats().prefix_cache_hits == 0


def test_memory_for_states_is_refused_by_name_where_no_layer_keeps_one() -> None:
    config = make_config()
    config = replace(config, cache=replace(config.cache, state_memory_bytes=1 << 20))
    with pytest.raises(ValueError, match="state_memory_bytes: no layer of this model keeps a state"):
        EngineCore(config, UniProcExecutor(HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)))


def test_a_request_begins_when_the_state_that_it_waited_for_is_not_kept() -> None:
    config = make_config(budget=32, max_num_seqs=2, long_prefill=12)
    config = replace(config, cache=replace(config.cache, state_memory_bytes=2 * 10_000))
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=1, state_bytes=10_000)
    core = EngineCore(config, UniProcExecutor(worker))
    prompt = [*PROMPT, 1]  # its last boundary lies within a step, and with two slots that state is not kept
    core.add_request(make_request("a", prompt, 60))
    core.add_request(make_request("b", [*prompt, 1]))
    ended = []
    while core.has_work():
        ended += [output.request_id for output in core.step().outputs if output.finish_reason is not None]
    assert ended == ["b", "a"], "a slot was free for b"


def test_states_lie_where_transports_read_them_also_after_sleep(core: EngineCore, chunk: int) -> None:
    executor: Any = core.executor
    [plane] = executor._worker.kv_pool().state_planes
    core.sleeping.sleep(1)
    core.sleeping.wake_up()
    core.add_request(make_request("a", PROMPT))
    assert tokens_of(finish(core)["a"]) == wanted(PROMPT, chunk)
    empty = plane[0] == plane[0, 0, 17]  # a byte behind the hash
    assert not empty.all(), "what the step wrote is not served"
