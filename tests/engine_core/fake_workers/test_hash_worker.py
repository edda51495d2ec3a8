import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, make_config
from tests.tokenloom.gguf.demo_file import write_demo_file
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens

PROMPT = [3, 1, 4, 1, 5, 9]


def make_worker() -> HashWorker:
    worker = HashWorker(make_config(block_size=4), vocab_size=VOCAB_SIZE)
    worker.load_model()
    worker.initialize_kv_cache(KVCacheConfig(8, 128))
    return worker


def run(
    worker: HashWorker,
    *,
    block_ids: list[int],
    num_computed: int = 0,
    num_tokens: int = 6,
    grammar: GrammarOutput | None = None,
) -> list[list[int]]:
    """Return a step with one new request."""
    new = NewRequestData("a", PROMPT, [], CoreSamplingParams(max_tokens=9, seed=0), block_ids, num_computed)
    worker.execute_model(
        SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": num_tokens}, num_tokens, [], [])
    )
    return worker.sample_tokens(grammar).sampled_token_ids


def go_on(worker: HashWorker, block_ids: list[int], num_computed: int, num_tokens: int = 1) -> list[list[int]]:
    cached = CachedRequestData(["a"], [block_ids], [num_computed], {})
    worker.execute_model(SchedulerOutput([], cached, {"a": num_tokens}, num_tokens, [], []))
    return worker.sample_tokens(None).sampled_token_ids


def test_tokens_do_not_depend_on_blocks_or_chunks() -> None:
    expected = expected_tokens(PROMPT, 2, VOCAB_SIZE)
    for block_ids in ([0, 1], [7, 2]):
        worker = make_worker()
        assert run(worker, block_ids=block_ids) == [expected[:1]]
        assert go_on(worker, [], 6) == [expected[1:]]
    worker = make_worker()
    assert run(worker, block_ids=[3], num_tokens=4) == [[]]
    assert go_on(worker, [5], 4, 2) == [expected[:1]]


def test_a_prefix_of_another_request_is_read() -> None:
    worker = make_worker()
    run(worker, block_ids=[0, 1])
    assert run(worker, block_ids=[0, 2], num_computed=4, num_tokens=2) == [expected_tokens(PROMPT, 1, VOCAB_SIZE)]


def test_a_block_that_was_never_written_changes_the_token() -> None:
    assert run(make_worker(), block_ids=[0, 1], num_computed=4, num_tokens=2) != [
        expected_tokens(PROMPT, 1, VOCAB_SIZE)
    ]


def test_a_block_in_the_wrong_place_changes_the_token() -> None:
    worker = make_worker()
    run(worker, block_ids=[0, 1])
    worker._rows["a"].slots = worker._rows["a"].slots[::-1].copy()
    assert go_on(worker, [], 6) != [expected_tokens(PROMPT, 2, VOCAB_SIZE)[1:]]


def test_a_block_taken_by_another_changes_the_token() -> None:
    worker = make_worker()
    run(worker, block_ids=[0, 1])
    worker._cache[0] = (8, 0)
    assert go_on(worker, [], 6) != [expected_tokens(PROMPT, 2, VOCAB_SIZE)[1:]]


def test_a_grammar_leaves_only_what_it_allows() -> None:
    bitmask = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    bitmask[0, 2] = 1 << 5
    assert run(make_worker(), block_ids=[0, 1], grammar=GrammarOutput(["a"], bitmask)) == [[2 * 32 + 5]]


def test_logprobs_list_the_token_and_the_best() -> None:
    worker = make_worker()
    params = CoreSamplingParams(max_tokens=9, seed=0, logprobs=2, logprob_token_ids=(5,))
    new = NewRequestData("a", PROMPT, [], params, [0, 1], 0)
    worker.execute_model(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"a": 6}, 6, [], []))
    (token_id,) = expected_tokens(PROMPT, 1, VOCAB_SIZE)
    told = worker.sample_tokens(None).logprobs["a"]
    assert (told.sampled, told.rank, told.top) == ([-1 / 8], [1], 3)
    assert told.token_ids == [token_id, (token_id + 1) % VOCAB_SIZE, 5]
    assert told.logprobs == [-1 / 8, -2 / 8, -((5 - token_id) % VOCAB_SIZE + 1) / 8]


@pytest.mark.parametrize("chunks", [[6], [4, 2], [1, 4, 1]])
def test_prompt_logprobs_come_in_chunks(chunks: list[int]) -> None:
    worker = make_worker()
    new = NewRequestData("a", PROMPT, [], CoreSamplingParams(max_tokens=9, seed=0, prompt_logprobs=1), [0, 1], 0)
    sampled, best, start = list[float](), list[int](), 0
    for number, chunk in enumerate(chunks):
        cached = CachedRequestData(*([["a"], [[]], [start]] if number else [[], [], []]), {})
        news = [] if number else [new]
        worker.execute_model(SchedulerOutput(news, cached, {"a": chunk}, chunk, [], []))
        result = worker.sample_tokens(None)
        assert not result.logprobs
        sampled += result.prompt_logprobs["a"].sampled
        best += result.prompt_logprobs["a"].token_ids
        start += chunk
    assert best == [expected_tokens(PROMPT[:n], 1, VOCAB_SIZE)[0] for n in range(1, 6)]
    ranks = [(taken - token_id) % VOCAB_SIZE + 1 for taken, token_id in zip(PROMPT[1:], best, strict=True)]
    assert sampled == [-rank / 8 for rank in ranks]
    assert go_on(worker, [], 6) == [expected_tokens(PROMPT, 2, VOCAB_SIZE)[1:]]


def test_order_matters() -> None:
    assert expected_tokens([1, 2], 1) != expected_tokens([2, 1], 1)


def test_more_tokens_than_there_are() -> None:
    with pytest.raises(AssertionError, match="or more than there are"):
        run(make_worker(), block_ids=[0, 1], num_tokens=7)


def test_sizes_come_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, "max_position_embeddings": 22}))
    model = HashWorker(EngineConfig(worker=WorkerConfig(model=str(tmp_path), worker="hash"))).load_model()
    assert (model.vocab_size, model.max_model_len) == (11, 22)


def test_sizes_come_from_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo_file(path)
    worker = HashWorker(EngineConfig(worker=WorkerConfig(model=str(path), worker="hash")))
    model = worker.load_model()
    assert (model.vocab_size, model.max_model_len) == (2048, 2048)
    worker.reload_weights(str(path))


def test_a_checkpoint_without_sizes_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json must state vocab_size"):
        HashWorker(EngineConfig(worker=WorkerConfig(model=str(tmp_path), worker="hash"))).load_model()


def test_a_step_takes_the_configured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("tokenloom.engine_core.fake_workers.hash_worker.time.sleep", slept.append)
    config = make_config(block_size=4)
    worker_config = msgspec.structs.replace(config.worker, step_seconds=0.25)
    worker = HashWorker(msgspec.structs.replace(config, worker=worker_config))
    worker.initialize_kv_cache(KVCacheConfig(8, 128))
    run(worker, block_ids=[0, 1])
    assert slept == [0.25]
