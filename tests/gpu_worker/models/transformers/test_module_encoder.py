"""Classes of transformers whose modules compute vectors, next to the same classes by themselves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.pooling.small_models import PROMPTS, SIZES, close, make_config, make_core, pool
from tokenloom.engine_core.data.core_params import PoolingTask
from tokenloom.gpu_worker.checkpoint.files.architectures import MODULE_ENCODERS
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.gpu_worker.encoders.encoder import load_encoder

_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "Albert": {"embedding_size": 16},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "DistilBert": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48},
    "Electra": {"embedding_size": 16},
    "EuroBert": {"mask_token_id": 3},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 130},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma3Text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "JinaEmbeddingsV3": {"pad_token_id": 1},
    "MPNet": {"pad_token_id": 1},
    "MT5": _T5,
    "MobileBert": {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Qwen2": {"num_key_value_heads": 2},
    "T5": _T5,
    "UMT5": _T5,
    "XLMRobertaXL": {"pad_token_id": 1},
}


# The third is computed together with the first, which is padded to its length.
TOGETHER = [*PROMPTS[:2], [*PROMPTS[0][::-1], 7], PROMPTS[2]]


def save(path: Path, architecture: str, **entries: Any) -> Any:
    """Save a checkpoint of random weights; returns what computes its hidden states."""
    name = architecture
    for ending in ("EncoderModel", "ForMaskedLM", "ForCausalLM", "Model"):
        name = name.removesuffix(ending)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | {"num_hidden_layers": 2} | OWN.get(name, {}) | entries)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return getattr(model, model.base_model_prefix, model)


@torch.no_grad()
def expected(body: Any) -> list[torch.Tensor]:
    return [body(input_ids=torch.tensor([prompt])).last_hidden_state[0] for prompt in TOGETHER]


def assert_equal(path: Path, wanted: list[torch.Tensor]) -> None:
    core = make_core(path)
    assert core.ready.pooling.is_encoder
    assert core.ready.pooling.tasks == (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
    for found, states in zip(pool(core, TOGETHER, PoolingTask.TOKEN_EMBED, use_activation=False), wanted, strict=True):
        close(found, states)


@pytest.mark.parametrize("architecture", sorted(MODULE_ENCODERS - {"JinaEmbeddingsV3ForMaskedLM"}))
def test_every_class_equals_transformers(tmp_path: Path, architecture: str) -> None:
    if not hasattr(transformers, architecture):
        pytest.skip("this class does not exist: preflight asks for a newer transformers")
    assert_equal(tmp_path, expected(save(tmp_path, architecture)))


@pytest.mark.parametrize("architecture", ["DebertaModel", "MPNetModel", "T5EncoderModel"])
def test_few_bits(tmp_path: Path, architecture: str) -> None:
    wanted = expected(save(tmp_path, architecture))
    core = make_core(tmp_path, dtype="bfloat16")
    for found, states in zip(pool(core, TOGETHER, PoolingTask.TOKEN_EMBED, use_activation=False), wanted, strict=True):
        assert torch.cosine_similarity(torch.as_tensor(found).float(), states).min() > 0.99


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3Model", "LlamaModel"])
def test_tokens_of_a_decoder_attend_to_later_ones(tmp_path: Path, architecture: str) -> None:
    body = save(tmp_path, architecture, is_causal=False, num_key_value_heads=2)
    body.set_attn_implementation("eager")
    wanted = expected(body)
    body.config.is_causal = True
    assert not torch.allclose(wanted[0], expected(body)[0], atol=1e-3)
    assert_equal(tmp_path, wanted)


def test_a_class_that_ignores_is_causal_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "GPTNeoModel", is_causal=False)
    with pytest.raises(ValueError, match="lets no token attend to later ones"):
        make_worker(make_config(tmp_path)).load_model()


@pytest.mark.parametrize(
    ("architecture", "name"), [("MPNetForMaskedLM", "mpnet.encoder.layer.0.gate.weight"), ("MPNetModel", "gate.weight")]
)
def test_tensors_that_no_class_reads_are_refused(tmp_path: Path, architecture: str, name: str) -> None:
    save(tmp_path, architecture)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"unsupported feature: .*gate\.weight"):
        make_worker(make_config(tmp_path)).load_model()


def test_an_unknown_activation_is_named(tmp_path: Path) -> None:
    """It was a KeyError, which ended the engine with a traceback."""
    save(tmp_path, "EuroBertModel")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "odd"}))
    with pytest.raises(ValueError, match="cannot make EuroBertModel: it has no 'odd'"):
        load_encoder(tmp_path)


def test_code_of_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "MPNetModel")
    config = tmp_path / "config.json"
    text = (
        config.read_text().replace('"MPNetModel"', '"NewModel"').replace("{", '{"is_causal": false, "auto_map": {},', 1)
    )
    config.write_text(text.replace('"auto_map": {}', '"auto_map": {"AutoModel": "modeling.NewModel"}'))
    with pytest.raises(ValueError, match="the code of NewModel is in the checkpoint"):
        make_worker(make_config(tmp_path)).load_model()


def test_quantized_at_load(tmp_path: Path) -> None:
    wanted = expected(save(tmp_path, "MPNetModel"))
    found = pool(make_core(tmp_path, quantization="int8-dynamic"), TOGETHER, PoolingTask.TOKEN_EMBED)
    for rows, states in zip(found, wanted, strict=True):
        cosines = torch.cosine_similarity(torch.from_numpy(rows), states)
        assert 0.99 < cosines.min() < 1 - 1e-6


def test_new_weights_and_others(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    save(tmp_path / "a", "MPNetModel")
    body = save(tmp_path / "b", "MPNetModel")
    with torch.no_grad():
        body.embeddings.word_embeddings.weight.mul_(1.5)
    body.save_pretrained(tmp_path / "b")
    save(tmp_path / "c", "MPNetModel", relative_attention_num_buckets=16)
    core = make_core(tmp_path / "a")
    core.sleeping.sleep(1)
    with pytest.raises(ValueError, match="another configuration"):
        core.sleeping.reload_weights(str(tmp_path / "c"))
    core.sleeping.reload_weights(str(tmp_path / "b"))
    core.sleeping.wake_up()
    [found] = pool(core, PROMPTS[:1], PoolingTask.TOKEN_EMBED, use_activation=False)
    close(found, expected(body)[0])
