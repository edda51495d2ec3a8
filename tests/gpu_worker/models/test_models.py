"""Every architecture against transformers, in float32, on small random checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.ops.cpu_ops import make_ops

SaveCheckpoint = Callable[..., Path]
EditConfig = Callable[..., None]
RunModel = Callable[..., list[Tensor]]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CPU = torch.device("cpu")
MIXED_LAYERS = ["full_attention", "sliding_attention", "full_attention"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head size": ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {}),
    "qwen2, window from layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, tied, biases": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, windows by layer": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "layer_types": MIXED_LAYERS},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2, low limits": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "gemma2, no limits": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"layer_types": MIXED_LAYERS}),
    "gemma3, linear rope": (
        "gemma3_text",
        {
            "layer_types": MIXED_LAYERS[1:] + MIXED_LAYERS[:1],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, window": ("phi3", {"sliding_window": 33, "num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
    "olmo2, biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3, windows": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 30}),
    "mixtral": ("mixtral", {}),
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1, "sliding_window": 40}),
    "qwen2 with experts": ("qwen2_moe", {}),
    "qwen2 with experts, weights of one": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen3 with experts": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3 with experts in some layers": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    "heads of 20": ("llama", {"head_dim": 20}),
    "opt": ("opt", {}),
    "opt, norms after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt, no biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt, no last norm": ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt2, scales by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
}

LENGTHS = [1, 16, 75, 230]
WHOLE = [LENGTHS]
CHUNKS_AND_DECODES = [
    [0, 16, 48, 0],
    [0, 0, 16, 48],
    *[[0, 0, 1, 63]] * 2,
    [1, 0, 1, 50],
    *[[0, 0, 1, 1]] * 6,
    [0, 0, 2, 0],
]


def prompts(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def transformers_logits(path: Path, inputs: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return [model(ids[None]).logits[0].float() for ids in inputs]


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_equal_transformers(
    name: str, backend: str, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    model_type, entries = MODELS[name]
    path = save_checkpoint(model_type, **entries)
    model = load_model(path, ops=make_ops(backend, CPU))
    inputs = prompts(model.config.vocab_size)
    expected = transformers_logits(path, inputs)
    assert torch.cat(expected).std() > 0.3  # or equality would show little
    for steps in (WHOLE, CHUNKS_AND_DECODES):
        for found, wanted in zip(run_model(model, inputs, steps, backend), expected, strict=True):
            assert found.dtype == torch.float32
            rows = len(found)
            torch.testing.assert_close(found, wanted[:rows], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_both_backends_give_the_same_logits(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    path = save_checkpoint("qwen2", use_sliding_window=True, sliding_window=33, max_window_layers=1)
    model = load_model(path)
    inputs = prompts(model.config.vocab_size)
    for steps in (WHOLE, CHUNKS_AND_DECODES):
        pairs = zip(run_model(model, inputs, steps), run_model(model, inputs, steps, "reference"), strict=True)
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
@torch.inference_mode()
def test_bfloat16_is_as_close_as_rounding_allows(
    model_type: str, backend: str, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    path = save_checkpoint(model_type, dtype=torch.bfloat16, initializer_range=0.08)
    model = load_model(path, ops=make_ops(backend, CPU))
    assert model.config.dtype == torch.bfloat16
    inputs = prompts(model.config.vocab_size)
    expected = torch.cat(transformers_logits(path, inputs, torch.bfloat16)).log_softmax(-1)
    found = torch.cat(run_model(model, inputs, WHOLE, backend)).log_softmax(-1)
    assert (found - expected).abs().mean() <= 2e-2


@torch.inference_mode()
def test_float32_from_a_bfloat16_checkpoint(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    path = save_checkpoint("llama", dtype=torch.bfloat16)
    inputs = prompts(199)
    found = run_model(load_model(path, "float32"), inputs, WHOLE)
    torch.testing.assert_close(found, transformers_logits(path, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@torch.inference_mode()
def test_sharded_weights(model_type: str, save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    path = save_checkpoint(model_type, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    inputs = prompts(199)
    found = run_model(load_model(path), inputs, WHOLE)
    torch.testing.assert_close(found, transformers_logits(path, inputs), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_gpt2_as_first_published(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    """Tensors without the outer module's name, and with the causal masks that a forward pass builds by itself."""
    path = save_checkpoint("gpt2")
    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512).tril() for layer in range(3)}
    save_file(tensors, file, {"format": "pt"})
    inputs = prompts(199)
    found = run_model(load_model(path), inputs, WHOLE)
    torch.testing.assert_close(found, transformers_logits(path, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["embedding", "output", "both, different"])
@torch.inference_mode()
def test_tied_weights_stored_under_either_name(
    stored: str, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    path = save_checkpoint("qwen2", tie_word_embeddings=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    if stored != "embedding":
        tensors["lm_head.weight"] = embedding if stored == "output" else embedding * 0.5
    if stored == "output":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, {"format": "pt"})
    inputs = prompts(199)
    found = run_model(load_model(path), inputs, WHOLE)
    torch.testing.assert_close(found, transformers_logits(path, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **{name: LLAMA3[name] for name in LLAMA3 if not name.startswith("rope")}},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
@torch.inference_mode()
def test_the_spelling_of_transformers_4(
    scaling: dict[str, Any] | None,
    save_checkpoint: SaveCheckpoint,
    edit_config: EditConfig,
    run_model: RunModel,
) -> None:
    path = save_checkpoint("llama", dtype=torch.bfloat16)
    edit_config(path, rope_parameters=..., dtype=..., rope_theta=700.0, rope_scaling=scaling, torch_dtype="float32")
    model = load_model(path)
    assert model.config.dtype == torch.float32
    inputs = prompts(199)
    found = run_model(model, inputs, WHOLE)
    torch.testing.assert_close(found, transformers_logits(path, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("quantization", "most"), [("int8-dynamic", 0.1), ("int4", 0.6)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantized_models_are_near_those_that_they_round(
    family: str, quantization: str, most: float, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    path = save_checkpoint(family)
    prompt = torch.arange(40) * 7 % 199
    plain, rounded = (
        run_model(load_model(path, quantization=name), [prompt], [[40]])[0] for name in (None, quantization)
    )
    error = (plain - rounded).norm() / plain.norm()
    assert 0 < error < most


def test_int4_computes_the_model_of_its_dequantized_weights(
    save_checkpoint: SaveCheckpoint, run_model: RunModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except that inputs are rounded to int8."""
    path, prompt = save_checkpoint("llama"), torch.arange(40) * 7 % 199
    rounded = run_model(load_model(path, quantization="int4"), [prompt], [[40]])[0]

    def refuse(*_: object) -> NoReturn:
        raise KernelsUnavailable("none")

    monkeypatch.setattr(linear, "QuantizedLinear", refuse)
    exact = run_model(load_model(path, quantization="int4"), [prompt], [[40]])[0]
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_another_quantization_is_refused_by_name(save_checkpoint: SaveCheckpoint) -> None:
    with pytest.raises(ValueError, match="quantization must be int8-dynamic, int4, fp8 or none, not 'gptq'"):
        load_model(save_checkpoint("llama"), quantization="gptq")
