"""What decoders and encoders pool, next to transformers' own classes."""

import json
from contextlib import nullcontext
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


def vector_of(mode: str, hidden: torch.Tensor, skipped: int) -> torch.Tensor:
    """Pool states [n, hidden_size] by the definition of a mode of sentence-transformers."""
    rest, positions = hidden[skipped:], torch.arange(skipped + 1, len(hidden) + 1)[:, None]
    by_mode = {
        "cls": rest[0],
        "lasttoken": rest[-1],
        "max": rest.max(0).values,
        "mean": rest.sum(0) / len(rest),
        "mean_sqrt_len_tokens": rest.sum(0) / len(rest) ** 0.5,
        "weightedmean": (rest * positions).sum(0) / positions.sum(),
    }
    return by_mode[mode]


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.parametrize("modes", [(mode,) for mode in MODES] + [("weightedmean", "cls", "max"), MODES])
def test_modes_of_pooling(tmp_path: Path, modes: tuple[str, ...]) -> None:
    model = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    save_pooling(tmp_path, {"type": "Pooling", "config": {"pooling_mode": modes}})
    core = make_core(tmp_path, budget=8)  # the longest prompt takes several steps
    assert core.ready.pooling.vector_size == 32 * len(modes)
    for skipped in (0, 2):
        found = pool(core, PROMPTS, PoolingTask.EMBED, skipped_tokens=skipped)
        for vector, prompt in zip(found, PROMPTS, strict=True):
            hidden = states(model, prompt)
            close(vector, torch.cat([vector_of(mode, hidden, skipped) for mode in modes]))


def test_prompt_without_a_text_has_no_direction(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    save_pooling(tmp_path, {"type": "Pooling", "config": {"pooling_mode": MODES}})
    [found] = pool(make_core(tmp_path), PROMPTS[:1], PoolingTask.EMBED, skipped_tokens=len(PROMPTS[0]))
    close(found, torch.zeros(6 * 32))


def test_switches_of_older_files_are_read_in_their_order(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "BertModel")
    config = {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True, "pooling_mode_cls_token": False}
    save_pooling(tmp_path, {"type": "Pooling", "config": config})
    hidden = states(model, PROMPTS[0])
    [found] = pool(make_core(tmp_path), PROMPTS[:1], PoolingTask.EMBED)
    close(found, torch.cat([hidden.max(0).values, hidden.mean(0)]))


def test_modules_are_applied_in_their_order(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "BertModel")
    dense = {"in_features": 32, "out_features": 8, "use_residual": True}
    pooling, normalize = {"type": "Pooling", "config": {"pooling_mode": "cls"}}, {"type": "Normalize", "config": {}}
    norm = {"type": "LayerNorm", "config": {"dimension": 32}}
    save_pooling(tmp_path, pooling, norm, normalize, {"type": "Dense", "config": dense})
    draw = torch.Generator().manual_seed(3)
    weight, bias, residual, scale, shift = (
        torch.randn(*shape, generator=draw) for shape in ((8, 32), (8,), (8, 32), (32,), (32,))
    )
    dense_tensors = {"linear.weight": weight, "linear.bias": bias, "residual.weight": residual}
    torch.save(dense_tensors, tmp_path / "4_Dense" / "pytorch_model.bin")
    save_file({"norm.weight": scale, "norm.bias": shift}, tmp_path / "2_LayerNorm" / "model.safetensors")
    x = F.normalize(F.layer_norm(states(model, PROMPTS[0])[0], (32,), scale, shift), dim=-1)
    expected = torch.tanh(F.linear(x, weight, bias)) + F.linear(x, residual)
    core = make_core(tmp_path)
    for activation, wanted in ((None, expected), (True, F.normalize(expected, dim=-1))):
        [found] = pool(core, PROMPTS[:1], PoolingTask.EMBED, use_activation=activation)
        close(found, wanted)


def save_joined(path: Path, num_inputs: int) -> None:
    """Save an encoder with two poolings and a Dense layer after them."""
    make_checkpoint(path, "BertModel")
    pooling = {"type": "Pooling", "config": {"pooling_mode": ["cls", "mean"]}}
    save_pooling(path, pooling, {"type": "Dense", "config": {"in_features": num_inputs, "out_features": 8}})
    weights = {"linear.weight": torch.ones(8, num_inputs), "linear.bias": torch.zeros(8)}
    save_file(weights, path / "2_Dense" / "model.safetensors")


def test_layers_after_several_poolings_give_no_vectors_of_tokens(tmp_path: Path) -> None:
    """Such a request failed the step, and with it all others of the engine."""
    save_joined(tmp_path, 64)
    core = make_core(tmp_path)
    assert core.ready.pooling.tasks == (PoolingTask.EMBED,)
    [found] = pool(core, PROMPTS[:1], PoolingTask.EMBED)
    assert found.shape == (8,)


def test_layers_of_another_size_are_refused_at_the_start(tmp_path: Path) -> None:
    save_joined(tmp_path, 32)
    with pytest.raises(ValueError, match="takes vectors of 32 numbers, and those before it give 64"):
        make_core(tmp_path)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"type": "LSTM", "config": {}}, "the module sentence_transformers.models.LSTM is not supported"),
        ({"type": "Dense", "config": {}}, "the module sentence_transformers.models.Dense before the pooling"),
        (
            {"type": "Pooling", "config": {"pooling_mode": "median"}},
            "1_Pooling/config.json: pooling modes are cls, max",
        ),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path: Path, module: dict[str, object], message: str) -> None:
    make_checkpoint(tmp_path, "BertModel")
    save_pooling(tmp_path, module)
    with pytest.raises(ValueError, match=message):
        make_core(tmp_path)


@pytest.mark.parametrize("architecture", ["Qwen3Model", "MistralModel", "Gemma2Model", "Phi3Model"])
def test_decoder_without_an_output_layer_only_pools(tmp_path: Path, architecture: str) -> None:
    """Base classes save their tensors without the prefix ``model.``; those of e5-mistral-7b-instruct are such files."""
    own = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    model = make_checkpoint(tmp_path, architecture, **own if architecture != "Phi3Model" else {"pad_token_id": 0})
    save_pooling(tmp_path, {"type": "Pooling", "config": {"pooling_mode": "lasttoken"}})
    core = make_core(tmp_path, budget=8)
    assert not core.ready.pooling.generates
    for found, prompt in zip(pool(core, PROMPTS, PoolingTask.EMBED), PROMPTS, strict=True):
        close(found, states(model, prompt)[-1])


@pytest.mark.parametrize("is_tied", [True, False])
def test_files_without_an_output_layer_under_the_name_of_a_whole_model(tmp_path: Path, is_tied: bool) -> None:
    """Qwen3-Embedding names Qwen3ForCausalLM, and its files are those of Qwen3Model."""
    model = make_checkpoint(tmp_path, "Qwen3Model", tie_word_embeddings=is_tied)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3Model", "Qwen3ForCausalLM"))
    save_pooling(tmp_path, {"type": "Pooling", "config": {"pooling_mode": "lasttoken"}})
    core = make_core(tmp_path)
    assert core.ready.pooling.generates == is_tied
    close(pool(core, PROMPTS[:1], PoolingTask.EMBED)[0], states(model, PROMPTS[0])[-1])
    with pytest.raises(ValueError, match="this model generates no text") if not is_tied else nullcontext():
        make_core(tmp_path, runner="generate")


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
def test_weights_whose_texts_become_other_tokens_are_refused(tmp_path: Path, name: str) -> None:
    """The tokenizer puts the prompts of the loaded checkpoint before texts."""
    for number in range(2):
        architecture = f"{name}ForCausalLM" if name == "Llama" else f"{name}Model"
        make_checkpoint(tmp_path / str(number), architecture)
        save_pooling(tmp_path / str(number), {"type": "Pooling", "config": {"pooling_mode": "mean"}})
        names = {"prompts": {"query": f"find {number}: "}}
        (tmp_path / str(number) / "config_sentence_transformers.json").write_text(json.dumps(names))
    core = make_core(tmp_path / "0", budget=128)
    core.sleeping.sleep(1)
    with pytest.raises(ValueError, match=r"text_rules of its pooling is .*find 1"):
        core.sleeping.reload_weights(str(tmp_path / "1"))


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


@pytest.mark.parametrize("name", ["Qwen3", "Bert"])
def test_weights_with_another_number_of_classes_are_refused(tmp_path: Path, name: str) -> None:
    """Also where the configurations name no classes."""
    for number in (3, 4):
        path = tmp_path / str(number)
        make_checkpoint(path, f"{name}ForSequenceClassification", num_labels=number)
        config = json.loads((path / "config.json").read_text())
        unnamed = {entry: value for entry, value in config.items() if entry not in ("id2label", "label2id")}
        (path / "config.json").write_text(json.dumps(unnamed | {"num_labels": number}))
    core = make_core(tmp_path / "3", budget=128)
    with pytest.raises(ValueError, match="not the same model"):
        core.sleeping.reload_weights(str(tmp_path / "4"))
    assert [len(found) for found in pool(core, PROMPTS, PoolingTask.CLASSIFY)] == [3, 3, 3]
