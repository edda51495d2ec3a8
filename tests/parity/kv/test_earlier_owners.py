"""What one client fills the pool with reaches no other: finite embeddings so large that the model computes NaN."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker

HIDDEN_SIZE, HEADS = 96, 4  # heads of 24, which the C++ kernels do not support
LARGE = 1e20
MAX_MODEL_LEN = 96
BLOCK_SIZE = 8
PROMPTS = {"a": [7, 3, 9], "b": [5], "c": list(range(20, 37))}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose LayerNorm makes NaN of large numbers."""
    config = transformers.GPT2Config(
        vocab_size=199,
        n_embd=HIDDEN_SIZE,
        n_layer=3,
        n_head=HEADS,
        n_positions=512,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoints") / "gpt2"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_core(checkpoint: Path, backend: str, dtype: str, block_size: int) -> EngineCore:
    config = EngineConfig(
        worker=WorkerConfig(model=str(checkpoint), dtype=dtype, num_threads=1, attention_backend=backend),
        cache=CacheConfig(num_blocks=MAX_MODEL_LEN // block_size, block_size=block_size),
        max_model_len=MAX_MODEL_LEN,
    )
    return EngineCore(config, UniProcExecutor(make_worker(config)))


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    """The outputs of each request; all are added at once."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_work():
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def prompt_of(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(name, PROMPTS[name], CoreSamplingParams(max_tokens=8, seed=0, temperature=0.0))


def attack(num_tokens: int, after: list[int] | None = None) -> EngineCoreRequest:
    """A prompt of embeddings after some tokens."""
    signs = np.sign(np.random.default_rng(0).normal(size=(num_tokens, HIDDEN_SIZE)))
    rows = (signs * LARGE).astype(np.float32)
    params = CoreSamplingParams(max_tokens=8, seed=0, temperature=0.0)
    after = after or []
    spans = [EmbedsSpan(len(after), rows)]
    return EngineCoreRequest("attack", [*after, *[0] * num_tokens], params, prompt_embeds=spans)


def tokens_of(outputs: dict[str, list[EngineCoreOutput]]) -> dict[str, list[int]]:
    return {name: [token for output in outputs[name] for token in output.new_token_ids] for name in PROMPTS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "block_size"), [("auto", 8), ("torch", 16), ("reference", 16)])
def test_nan_of_one_client_does_not_reach_others(checkpoint: Path, backend: str, block_size: int, dtype: str) -> None:
    core = make_core(checkpoint, backend, dtype, block_size)
    expected = tokens_of(run(core, *map(prompt_of, PROMPTS)))
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS), "worth comparing with"
    core.reset_prefix_cache()
    (failed,) = run(core, attack(MAX_MODEL_LEN - 6))["attack"]
    assert (failed.finish_reason, failed.new_token_ids) == (FinishReason.ERROR, [])
    assert "no finite logit" in failed.error
    assert tokens_of(run(core, *map(prompt_of, PROMPTS))) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_others_of_the_batch_continue(checkpoint: Path, dtype: str) -> None:
    expected = tokens_of(run(make_core(checkpoint, "auto", dtype, BLOCK_SIZE), *map(prompt_of, PROMPTS)))
    outputs = run(make_core(checkpoint, "auto", dtype, BLOCK_SIZE), attack(20), *map(prompt_of, PROMPTS))
    assert [output.finish_reason for output in outputs["attack"]] == [FinishReason.ERROR]
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("backend", "block_size"), [("auto", 8), ("torch", 16), ("reference", 16)])
def test_a_shared_prefix_does_not_carry_nan(checkpoint: Path, backend: str, block_size: int, dtype: str) -> None:
    expected = tokens_of(run(make_core(checkpoint, backend, dtype, block_size), *map(prompt_of, PROMPTS)))
    core = make_core(checkpoint, backend, dtype, block_size)
    # The prompts of the same step share the blocks before the embeddings.
    outputs = run(core, attack(20, after=PROMPTS["c"]), *map(prompt_of, PROMPTS))
    assert [output.finish_reason for output in outputs["attack"]] == [FinishReason.ERROR]
    assert tokens_of(outputs) == expected
