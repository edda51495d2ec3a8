"""Built-in models of which some layers keep a state: the tokens of transformers, and the same bits wherever cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.models.transformers.test_states import Driver, draw, generate
from tests.parity.state_checkpoints import SERVED, make_model
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.models.decoder import DecoderModel
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
KINDS = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "granitemoehybrid",
    "granite without experts",
    "lfm2",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
    "kimi_linear",
)
_EXPERTS = {name: value for name, value in SERVED["qwen3_next"].items() if name != "intermediate_size"}
FACTORS = {
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.7,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.9, 0.6],
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
    "ssm_out_multiplier": 0.8,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "falcon_h1": SERVED["falcon_h1"] | FACTORS,
    "qwen3_5_moe_text": _EXPERTS,
    "granitemoehybrid": {
        **SERVED["granitemoehybrid"],
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    for kind, entries in _CHANGES.items():
        monkeypatch.setitem(SERVED, kind, entries)

    def make(kind: str, dtype: torch.dtype = torch.float32) -> Any:
        if kind != "granite without experts":
            return make_model(kind, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SERVED["granitemoehybrid"], "num_local_experts", 0)
            return make_model("granitemoehybrid", dtype)

    return make


def load(path: Path, dtype: str = "float32", quantization: str | None = None) -> Any:
    with torch.inference_mode():
        return load_model(path, dtype, ops=make_ops("auto", CPU), quantization=quantization)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, make: Any, tmp_path: Path) -> None:
    """Prompts cut anywhere, beside each other and beside decoding rows, with a snapshot inside a step, and a fork."""
    reference = make(kind)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert isinstance(model, DecoderModel)
    driver, prompt = Driver(model), draw(141, seed=1)
    long, short, one = driver.begin(prompt), driver.begin(draw(5, seed=2)), driver.begin(draw(1, seed=3))
    driver.step((long, [(37, 0)]), (short, [(5, 1)]))
    driver.decode((short, 2))
    short.tokens.append(int(short.logits[-1][-1].argmax()))
    driver.step((short, [(1, 2)]), (long, [(63, 3), (41, 4)]), (one, [(1, 5)]))
    fork = driver.begin([*prompt[:100], *draw(9, seed=8)], slot=3)
    fork.table, fork.done = long.table, 100
    for _ in range(6):
        driver.decode((long, 4), (short, 2), (one, 5))
    for sequence, length in ((long, 141), (short, 5), (one, 1)):
        assert sequence.tokens == generate(reference, sequence.tokens[:length], len(sequence.tokens) - length)
    driver.step((fork, [(9, 6)]))
    with torch.inference_mode():
        expected = reference(torch.tensor([fork.tokens])).logits[0, 100:]
    torch.testing.assert_close(fork.logits[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("quantization", [None, "int8-dynamic", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_the_bits_do_not_depend_on_cuts(
    kind: str, quantization: str | None, make: Any, tmp_path: Path
) -> None:
    make(kind, torch.bfloat16).save_pretrained(tmp_path)
    driver = Driver(load(tmp_path, "bfloat16", quantization))
    prompt = draw(150, seed=5)
    whole, cut, runs = (driver.begin(prompt) for _ in range(3))
    driver.step((whole, [(150, 0)]))
    states = [[each[0].clone() for each in layer if each is not None] for layer in driver.slots.layers if layer]
    for count in (37, 63, 49, 1):
        driver.step((cut, [(count, 1)]))
    driver.step((runs, [(100, 2), (50, 3)]))
    # The first layers keep states, which nothing but convolutions and recurrences could make differ.
    for layer, expected in zip([each for each in driver.slots.layers if each], states, strict=True):
        for found, exact in zip([each for each in layer if each is not None], expected, strict=True):
            for slot in (1, 3):
                torch.testing.assert_close(found[slot], exact, rtol=2e-2, atol=2e-2)
            if layer is driver.slots.layers[0]:
                assert torch.equal(found[1], exact)
                assert torch.equal(found[3], exact)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_computes_the_same(kind: str, make: Any, tmp_path: Path) -> None:
    make(kind).save_pretrained(tmp_path)
    results = []
    for ops, backend in ((make_ops("auto", CPU), "auto"), (TorchOps(), "reference")):
        with torch.inference_mode():
            driver = Driver(load_model(tmp_path, "float32", ops=ops))
        driver._backend = make_attention_backend(backend, driver._model.config, 16, CPU)
        row = driver.begin(draw(40, seed=9))
        driver.step((row, [(33, 0)]))
        driver.step((row, [(7, 1)]))
        results.append(torch.cat(row.logits))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_the_text_of_a_vision_checkpoint_is_computed(make: Any, tmp_path: Path) -> None:
    """As published, Qwen3.5 has a nested configuration, tensors of another part, and those of a head that drafts."""
    reference = make("qwen3_5_text")
    reference.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4}
    text |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(names | {"text_config": text, "vision_config": {"depth": 2}}))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    others = {"model.visual.blocks.0.norm1.weight": torch.zeros(4), "mtp.fc.weight": torch.zeros(4, 8)}
    save_file(renamed | others, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert isinstance(model, DecoderModel)
    driver, prompt = Driver(model), draw(70, seed=6)
    row = driver.begin(prompt)
    driver.step((row, [(70, 0)]))
    for _ in range(6):
        driver.decode((row, 0))
    assert row.tokens == generate(reference, prompt, 6)


def test_steps_of_time_of_nemotron_h_have_the_limits_of_its_configuration(make: Any, tmp_path: Path) -> None:
    """``time_step_limit``, of a prompt and of a token that decodes; transformers has ``time_step_min`` for prompts."""
    states = []
    for limits in ([0.0, float("inf")], [0.01, float("inf")]):
        reference = make_model("nemotron_h", time_step_limit=limits)
        reference.model.layers[0].mixer.dt_bias.fill_(-20.0)  # softplus(-20) is far below time_step_min
        reference.save_pretrained(tmp_path)
        driver, prompt = Driver(load(tmp_path)), draw(9, seed=4)
        whole, single = driver.begin(prompt), driver.begin(prompt)
        driver.step((whole, [(9, 0)]))
        for _ in prompt:
            driver.step((single, [(1, 1)]))
        assert driver.slots.layers[0] is not None
        first = driver.slots.layers[0].recurrent
        assert first is not None
        assert torch.equal(first[0], first[1])
        states.append(first[0].norm())
    assert states[1] > 100 * states[0]


@pytest.mark.parametrize("norms_first", [False, True])
def test_falcon_h1_may_have_a_norm_and_biases(norms_first: bool, make: Any, tmp_path: Path) -> None:
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
    reference = make_model("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=norms_first, **biases)
    for name, parameter in reference.named_parameters():
        if name.endswith(("bias", "mamba.norm.weight")):
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    reference.save_pretrained(tmp_path)
    driver = Driver(load(tmp_path))
    row = driver.begin(draw(40, seed=1))
    driver.step((row, [(33, 0)]))
    driver.step((row, [(7, 0)]))
    with torch.inference_mode():
        expected = reference(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=1e-3, atol=1e-3)


def test_a_published_kimi_linear_counts_its_layers_from_one(make: Any, tmp_path: Path) -> None:
    """Entries of moonshotai/Kimi-Linear-48B-A3B-Instruct (config.json); its first MLP is called as that of others."""
    reference = make("kimi_linear")
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    lists = {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    delta = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}
    for name in ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"):
        del config[name]
    config |= {"linear_attn_config": lists | delta, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    config |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True}
    config |= {"num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): each for name, each in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    driver = Driver(load(tmp_path))
    row = driver.begin(draw(20, seed=1))
    driver.step((row, [(20, 0)]))
    with torch.inference_mode():
        expected = reference(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=1e-3, atol=1e-3)


def test_a_published_nemotron_h_names_its_layers_by_letters(make: Any, tmp_path: Path) -> None:
    reference = make("nemotron_h")
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layers_block_type"]
    older = {"attention_head_dim": 16, "num_hidden_layers": 4, "num_query_groups": 8, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config | {"hybrid_override_pattern": "M-*M"} | older))
    driver, row = Driver(load(tmp_path)), None
    row = driver.begin(draw(20, seed=1))
    driver.step((row, [(20, 0)]))
    expected = reference(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=1e-3, atol=1e-3)


def test_a_mamba_2_that_states_no_length_has_that_of_the_options(make: Any, tmp_path: Path) -> None:
    make("mamba2").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Mamba2ForCausalLM"]}))
    assert load_model_config(tmp_path, "float32").max_model_len == 2048
    assert load_model_config(tmp_path, "float32", max_model_len=50_000).max_model_len == 50_000


def test_other_weights_replace_those_of_a_model(make: Any, tmp_path: Path) -> None:
    make("qwen3_next").save_pretrained(tmp_path)
    loader = ModelLoader("float32", ops=make_ops("auto", CPU))
    with torch.inference_mode():
        model = loader.load(tmp_path)
        loader.check(tmp_path)
        loader.replace_weights(model, tmp_path)
    driver, row = Driver(model), None
    row = driver.begin(draw(20, seed=1))
    driver.step((row, [(20, 0)]))
    expected = make("qwen3_next")(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "entries", "named"),
    [
        ("qwen3_5_text", {"output_gate_type": "tanh"}, "output_gate_type"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_key_heads"),
        ("qwen3_5_text", {"linear_key_head_dim": 1024}, "linear_key_head_dim"),
        ("granitemoehybrid", {"time_step_limit": [0.1]}, "time_step_limit"),
        ("granitemoehybrid", {"mamba_d_head": 7}, "mamba_d_head"),
        ("granitemoehybrid", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("mamba2", {"num_heads": 7}, "head_dim"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "moe, which is not built in"),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"]}, "layers_block_type"),
        ("nemotron_h", {"sliding_window": 64}, "sliding_window"),
        ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers"),
        ("nemotron_h", {"mamba_num_heads": 7}, "n_groups"),
    ],
)
def test_what_is_not_computed_is_named(
    kind: str, entries: dict[str, Any], named: str, make: Any, tmp_path: Path
) -> None:
    make(kind).config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(make(kind).config)].__name__
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]} | entries))
    with pytest.raises(ValueError, match=named):
        load_model_config(tmp_path, "float32")
