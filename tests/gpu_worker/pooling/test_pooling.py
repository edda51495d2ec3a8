"""What decoders and encoders pool, next to transformers' own classes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.gpu_worker.pooling.small_models import (
    PROMPTS,
    close,
    logits,
    make_checkpoint,
    make_core,
    pool,
    save_pooling,
    states,
)
from tokenloom.engine_core.data.config import PoolerConfig
from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams, CoreSamplingParams, PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreRequest


@pytest.mark.parametrize("budget", [256, 12])
def test_decoder_pools_as_chosen(tmp_path: Path, budget: int) -> None:
    model = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    hidden = [states(model, prompt) for prompt in PROMPTS]
    by_type = {
        "LAST": [each[-1] for each in hidden],
        "MEAN": [each.mean(0) for each in hidden],
        "CLS": [each[0] for each in hidden],
    }
    for pooling, vectors in by_type.items():
        core = make_core(tmp_path, budget=budget, pooler_config=PoolerConfig(pooling_type=pooling))  # type: ignore[arg-type]
        for _ in range(2):  # the second time the prefix cache holds the prompts
            for found, vector in zip(pool(core, PROMPTS, PoolingTask.EMBED), vectors, strict=True):
                close(found, F.normalize(vector, dim=-1))
        for found, each in zip(pool(core, PROMPTS, PoolingTask.TOKEN_EMBED, use_activation=False), hidden, strict=True):
            close(found, each)


def test_tokens_stay_the_same_next_to_embeddings(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    texts = []
    for count in (0, 3):
        core = make_core(tmp_path, budget=12, pooler_config=PoolerConfig())
        core.add_request(
            EngineCoreRequest("text", PROMPTS[2], CoreSamplingParams(max_tokens=20, seed=3, temperature=1.0))
        )
        for index in range(count):
            pooling = CorePoolingParams(PoolingTask.EMBED)
            core.add_request(EngineCoreRequest(str(index), PROMPTS[index], DRAWS_NOTHING, pooling_params=pooling))
        outputs = [output for _ in range(40) for output in core.step().outputs]
        texts.append([token for output in outputs for token in output.new_token_ids])
        assert sum(output.pooled is not None for output in outputs) == count
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]


def test_files_of_sentence_transformers_are_read(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Qwen3ForCausalLM", matryoshka_dimensions=[4, 8])
    dense = {
        "in_features": 32,
        "out_features": 12,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    save_pooling(
        tmp_path,
        {"type": "Pooling", "config": pooling},
        {"type": "Dense", "config": dense},
        {"type": "Normalize", "config": {}},
    )
    weight, bias = torch.randn(12, 32), torch.randn(12)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    core = make_core(tmp_path)
    assert core.ready.pooling.generates
    assert core.ready.pooling.matryoshka
    for dimensions in (None, 4):
        for found, prompt in zip(pool(core, PROMPTS, PoolingTask.EMBED, dimensions=dimensions), PROMPTS, strict=True):
            vector = torch.tanh(F.linear(states(model, prompt).mean(0), weight, bias))[:dimensions]
            close(found, F.normalize(vector, dim=-1))
    pooling_params = CorePoolingParams(PoolingTask.EMBED, dimensions=5)
    core.add_request(EngineCoreRequest("5", PROMPTS[0], DRAWS_NOTHING, pooling_params=pooling_params))
    [output] = core.step().outputs
    assert (output.error, output.error_field) == ("dimensions is 5; this model's vectors can have 4, 8", "dimensions")


@pytest.mark.parametrize("name", ["Bert", "XLMRoberta", "ModernBert"])
def test_encoder_embeds(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, f"{name}Model")
    pooling = {"pooling_mode": "mean"}
    save_pooling(tmp_path, {"type": "Pooling", "config": pooling})
    core = make_core(tmp_path)
    assert not core.ready.pooling.generates
    expected = [states(model, prompt) for prompt in PROMPTS]
    for found, hidden in zip(pool(core, PROMPTS, PoolingTask.EMBED), expected, strict=True):
        close(found, hidden.mean(0))
    for found, hidden in zip(pool(core, PROMPTS, PoolingTask.TOKEN_EMBED), expected, strict=True):
        close(found, hidden)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Bert", "XLMRoberta", "ModernBert"])
def test_classes(tmp_path: Path, name: str, num_labels: int) -> None:
    model = make_checkpoint(tmp_path, f"{name}ForSequenceClassification", num_labels=num_labels)
    core = make_core(tmp_path, budget=128 if name in ("Bert", "XLMRoberta", "ModernBert") else 12)
    for found, prompt in zip(pool(core, PROMPTS, PoolingTask.CLASSIFY), PROMPTS, strict=True):
        expected = logits(model, prompt)
        close(found, expected.sigmoid() if num_labels == 1 else expected.softmax(-1))
    for found, prompt in zip(pool(core, PROMPTS, PoolingTask.CLASSIFY, use_activation=False), PROMPTS, strict=True):
        close(found, logits(model, prompt))
    if num_labels == 1:
        [score] = pool(core, PROMPTS[:1], PoolingTask.SCORE)
        close(score, logits(model, PROMPTS[0]).sigmoid()[0])


def test_parts_have_token_types(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "BertForSequenceClassification", num_labels=1)
    expected = logits(model, PROMPTS[0], token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]))
    [score] = pool(make_core(tmp_path), PROMPTS[:1], PoolingTask.SCORE, first_part_tokens=4)
    close(score, expected.sigmoid()[0])


def test_encoder_needs_steps_of_whole_prompts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "BertModel")
    core = make_core(tmp_path, budget=20)
    assert core.ready.max_model_len == 20
    pooling = CorePoolingParams(PoolingTask.EMBED)
    core.add_request(EngineCoreRequest("long", PROMPTS[2], DRAWS_NOTHING, pooling_params=pooling))
    core.add_request(EngineCoreRequest("text", PROMPTS[1], CoreSamplingParams(max_tokens=2, seed=0)))
    errors = [output.error for output in core.step().outputs]
    assert errors == [
        "prompt has 31 tokens; the context holds 20",
        "this model generates no tokens; it serves the pooling tasks embed, token_embed",
    ]


def test_decoder_without_files_only_generates(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    assert make_core(tmp_path).ready.pooling.tasks == ()
    core = make_core(tmp_path, runner="pooling")
    assert core.ready.pooling.tasks == (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    assert not core.ready.pooling.generates


def test_classifier_cannot_generate(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForSequenceClassification")
    with pytest.raises(ValueError, match="this model generates no text"):
        make_core(tmp_path, runner="generate")


def save_dense(path: Path, seed: int, *, out: int = 6) -> None:
    """Save a decoder that pools through a dense layer of random weights."""
    make_checkpoint(path, "Qwen3ForCausalLM")
    dense = {
        "in_features": 32,
        "out_features": out,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    save_pooling(path, {"type": "Pooling", "config": {"pooling_mode": "mean"}}, {"type": "Dense", "config": dense})
    weights = {"linear.weight": torch.randn(out, 32, generator=torch.Generator().manual_seed(seed))}
    save_file(weights, path / "2_Dense" / "model.safetensors")


@pytest.mark.parametrize("level", [None, 1, 2])
def test_new_weights_bring_their_dense_layers(tmp_path: Path, level: int | None) -> None:
    for seed, name in enumerate("ab"):
        save_dense(tmp_path / name, seed)
    [expected] = pool(make_core(tmp_path / "b"), PROMPTS[:1], PoolingTask.EMBED)
    core = make_core(tmp_path / "a")
    if level is not None:
        core.sleeping.sleep(level)
    core.sleeping.reload_weights(str(tmp_path / "b"))
    core.sleeping.wake_up()
    [found] = pool(core, PROMPTS[:1], PoolingTask.EMBED)
    close(found, torch.from_numpy(expected))


@pytest.mark.parametrize("asleep", [False, True])
def test_weights_that_pool_otherwise_are_refused(tmp_path: Path, asleep: bool) -> None:
    save_dense(tmp_path / "a", 0)
    save_dense(tmp_path / "b", 0, out=5)
    core = make_core(tmp_path / "a")
    [expected] = pool(core, PROMPTS[:1], PoolingTask.EMBED)
    if asleep:
        core.sleeping.sleep(1)
    with pytest.raises(ValueError, match="vector_size of its pooling is 5 in the new checkpoint and 6 in the loaded"):
        core.sleeping.reload_weights(str(tmp_path / "b"))
    core.sleeping.wake_up()
    [found] = pool(core, PROMPTS[:1], PoolingTask.EMBED)
    close(found, torch.from_numpy(expected))


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_weights_with_other_names_of_classes_are_refused(tmp_path: Path, name: str) -> None:
    for number in range(2):
        labels = {0: "good", 1: f"bad{number}"}
        make_checkpoint(tmp_path / str(number), f"{name}ForSequenceClassification", id2label=labels)
    core = make_core(tmp_path / "0", budget=128)
    core.sleeping.sleep(1)
    with pytest.raises(ValueError, match="class_labels of its pooling is"):
        core.sleeping.reload_weights(str(tmp_path / "1"))
    core.sleeping.reload_weights(str(tmp_path / "0"))
    core.sleeping.wake_up()
    assert len(pool(core, PROMPTS, PoolingTask.CLASSIFY)) == 3
