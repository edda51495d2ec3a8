"""Rows of a model's own embedding table, given as prompt embeddings, are the prompt itself."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.gpu_worker.conftest import SaveCheckpoint
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.batch.prompt_rows import PromptEmbeds
from tokenloom.gpu_worker.devices import CPUWorker

PROMPT = np.random.default_rng(0).integers(1, 199, 40).tolist()


def make_core(model: Path, budget: int) -> EngineCore:
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), num_threads=1),
        cache=CacheConfig(num_blocks=12),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
        max_model_len=64,
    )
    return EngineCore(config, UniProcExecutor(CPUWorker(config)))


def generate(core: EngineCore, spans: list[EmbedsSpan]) -> list[int]:
    prompt = PROMPT.copy()
    for span in spans:
        prompt[span.position : span.position + len(span.rows)] = [0] * len(span.rows)
    request = EngineCoreRequest("a", prompt, CoreSamplingParams(max_tokens=12, seed=0, temperature=0.0))
    request.prompt_embeds = spans
    core.add_request(request)
    tokens = []
    while core.has_work():
        for output in core.step().outputs:
            assert not output.error
            tokens += output.new_token_ids
    return tokens


@pytest.mark.parametrize(
    ("model_type", "name"), [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
@pytest.mark.parametrize("budget", [7, 64])
def test_rows_of_the_embedding_table_give_the_tokens_of_their_ids(
    save_checkpoint: SaveCheckpoint, model_type: str, name: str, budget: int
) -> None:
    path = save_checkpoint(model_type)
    table = load_file(path / "model.safetensors")[name]
    core = make_core(path, budget)
    expected = generate(core, [])
    assert len(set(expected)) > 1, "a model that repeats one token would prove little"
    for ranges in ([(0, 40)], [(0, 3), (5, 22)], [(39, 40)], [(6, 8), (8, 21)]):
        spans = [EmbedsSpan(first, table[PROMPT[first:last]]) for first, last in ranges]
        assert generate(core, spans) == expected
    assert generate(core, [EmbedsSpan(0, table[PROMPT[:40]] * 2)]) != expected


def test_a_step_takes_the_rows_of_the_tokens_it_computes() -> None:
    embeds = PromptEmbeds()
    assert not embeds.spans
    rows = np.arange(20, dtype=np.float32).reshape(10, 2)
    embeds.add(3, [EmbedsSpan(4, rows)])
    found = embeds.gather(np.array([1, 3]), np.array([0, 6]), np.array([5, 3]), np.array([0, 5, 8], dtype=np.int32))
    assert [(start, part.tolist()) for start, part in found] == [(5, rows[2:5].tolist())]
    found = embeds.gather(np.array([3]), np.array([2]), np.array([4]), np.array([0, 4], dtype=np.int32))
    assert [(start, part.tolist()) for start, part in found] == [(2, rows[:2].tolist())]
    assert not embeds.gather(np.array([3]), np.array([14]), np.array([1]), np.array([0, 1], dtype=np.int32))
    embeds.remove(3)
    embeds.remove(3)
    assert not embeds.spans


def test_rows_behind_the_computed_tokens_are_left_alone() -> None:
    """A batch whose embeddings are all computed gathers its steps with the kernel again."""
    embeds = PromptEmbeds()
    rows = np.zeros((4, 2), np.float32)
    embeds.add(0, [EmbedsSpan(2, rows)])
    embeds.add(1, [EmbedsSpan(2, rows)], num_computed=6)
    assert list(embeds.live) == [0]
    embeds.settle(np.array([0, 1]), np.array([5, 9], dtype=np.int32))
    assert list(embeds.live) == [0]
    embeds.settle(np.array([0]), np.array([6], dtype=np.int32))
    assert not embeds.live
    assert list(embeds.spans) == [0, 1]


def test_images_have_no_id_that_counts() -> None:
    """Nor one above the vocabulary."""
    batch = InputBatch(1, 64, 16)
    params = CoreSamplingParams(max_tokens=5, seed=0, repetition_penalty=2.0)
    media = [MediaSpan(1, 2, 0, b"key", 2)]
    new = NewRequestData("r", [4, 99_999, 99_999, 3], [], params, [1], 0, media=media)
    batch.update(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"r": 4}, 4, [], []))
    given = {"r": [EmbedsSpan(1, np.ones((2, 8), np.float32))]}
    inputs = batch.prepare({"r": 4}, media_rows=given)
    assert inputs.token_ids.tolist() == [4, 0, 0, 3]
    assert [start for start, _ in inputs.embeds] == [1]
    logits = np.full((1, 6), 4.0, np.float32)
    batch.logits_processors.apply(logits, inputs.rows)
    assert logits.tolist() == [[4.0, 4.0, 4.0, 2.0, 2.0, 4.0]]
    assert batch.known_tokens("r").tolist() == [4, -2, -3, 3]


def test_tokens_with_embeddings_have_no_id_that_counts() -> None:
    """Not for penalties of the prompt, and not for drafts that repeat it: id 0 stands in their places."""
    batch = InputBatch(2, 64, 16)
    spans = [EmbedsSpan(0, np.ones((2, 8), np.float32)), EmbedsSpan(3, np.ones((1, 8), np.float32))]
    params = CoreSamplingParams(max_tokens=5, seed=0, repetition_penalty=2.0)
    new = NewRequestData("r", [0, 0, 3, 0, 0], [5], params, [1], 0, prompt_embeds=spans)
    other = NewRequestData("s", [0, 3], [], params, [2], 0)
    batch.update(SchedulerOutput([new, other], CachedRequestData([], [], [], {}), {"r": 6, "s": 2}, 8, [], []))
    logits = np.full((2, 6), 4.0, np.float32)
    rows = batch.prepare({"r": 6, "s": 2}).rows
    batch.logits_processors.apply(logits, rows)
    assert logits.tolist() == [[2.0, 4.0, 4.0, 2.0, 4.0, 2.0], [2.0, 4.0, 4.0, 2.0, 4.0, 4.0]]
    assert batch.known_tokens("r").tolist() == [-1, -2, 3, -4, 0, 5]
    assert batch.known_tokens("s").tolist() == [0, 3]


def test_a_prompt_of_embeddings_alone_has_seen_no_token() -> None:
    batch = InputBatch(1, 64, 16)
    params = CoreSamplingParams(max_tokens=5, seed=0, repetition_penalty=2.0)
    new = NewRequestData("r", [0] * 5, [], params, [1], 0, prompt_embeds=[EmbedsSpan(0, np.ones((5, 8), np.float32))])
    batch.update(SchedulerOutput([new], CachedRequestData([], [], [], {}), {"r": 5}, 5, [], []))
    logits = np.full((1, 6), 4.0, np.float32)
    batch.logits_processors.apply(logits, batch.prepare({"r": 5}).rows)
    assert logits.tolist() == [[4.0] * 6]
