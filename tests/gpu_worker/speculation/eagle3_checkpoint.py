"""Writes a tiny Llama and an EAGLE-3 head for it, as published ones are stored, and computes the head slowly."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

SIZE = VOCAB = 64
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 16
NUM_LAYERS = 8
OUTPUTS = 48
EPS = 1e-5
THETA = 10_000.0


def write_model(path: Path, *, is_sharp: bool = False) -> Any:
    """Write a model. ``is_sharp``: token x is followed by ``SUCCESSOR[x]``, whatever precedes it."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.mul_(3)
    if is_sharp:
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.001)
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.copy_(follows())
    model.save_pretrained(path)
    return model


SUCCESSOR = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))


def follows() -> Tensor:
    """Return the matrix that turns a token's unit vector into twice that of its successor."""
    return 2 * F.one_hot(SUCCESSOR, VOCAB).T.float()


def drafted() -> Tensor:
    """Return the tokens that the head may draft, [OUTPUTS]."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(8))[:OUTPUTS].sort().values


def write_head(
    path: Path, model: Any, *, num_states: int = 3, is_sharp: bool = False, **entries: Any
) -> dict[str, Tensor]:
    """Write a head with the published names. ``is_sharp``: its first draft is right after a sharp model's token."""
    generator = torch.Generator().manual_seed(5)

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * 2 * inputs**-0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(SIZE, generator=generator)

    tensors = {
        "fc.weight": matrix(SIZE, num_states * SIZE),
        **{
            f"midlayer.{name}.weight": norm() for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "midlayer.self_attn.q_proj.weight": matrix(NUM_HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.k_proj.weight": matrix(NUM_KV_HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.v_proj.weight": matrix(NUM_KV_HEADS * HEAD_SIZE, 2 * SIZE),
        "midlayer.self_attn.o_proj.weight": matrix(SIZE, NUM_HEADS * HEAD_SIZE),
        "midlayer.mlp.gate_proj.weight": matrix(80, SIZE),
        "midlayer.mlp.up_proj.weight": matrix(80, SIZE),
        "midlayer.mlp.down_proj.weight": matrix(SIZE, 80),
        "norm.weight": norm(),
        "lm_head.weight": matrix(OUTPUTS, SIZE),
    }
    if is_sharp:
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name].mul_(0.001)
        # The states hold the token before the last one, and the first draft follows the last one.
        tensors["fc.weight"] = torch.cat([follows(), *[torch.zeros(SIZE, SIZE)] * (num_states - 1)], 1)
        tensors["norm.weight"] = torch.ones(SIZE)
        tensors["lm_head.weight"] = follows()[drafted()]
    tokens = drafted()
    tensors["d2t"] = tokens - torch.arange(OUTPUTS)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), tokens)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 128,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": VOCAB,
        "draft_vocab_size": OUTPUTS,
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config | entries))
    save_file(
        {name: each.to(model.dtype) if each.is_floating_point() else each for name, each in tensors.items()},
        path / "model.safetensors",
    )
    return tensors


def compute_head(
    tensors: dict[str, Tensor], embeddings: Tensor, states: Tensor, *, norms_residual: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the states [T, SIZE] and the logits [T, VOCAB] of tokens with ``embeddings`` [T, SIZE] at positions 0 to
    T - 1, behind tokens with ``states`` of the model [T, states * SIZE]."""

    def norm(rows: Tensor, name: str) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * tensors[f"{name}.weight"]

    def layer(rows: Tensor, name: str) -> Tensor:
        return rows @ tensors[f"midlayer.{name}.weight"].T

    stream = states @ tensors["fc.weight"].T
    normed = norm(stream, "midlayer.hidden_norm")
    joined = torch.cat((norm(embeddings, "midlayer.input_layernorm"), normed), -1)
    query, key = (_rotate(layer(joined, f"self_attn.{name}_proj")) for name in "qk")
    value = layer(joined, "self_attn.v_proj").view(len(joined), -1, HEAD_SIZE)
    group = NUM_HEADS // NUM_KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * HEAD_SIZE**-0.5
    scores.masked_fill_(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(group, 1)).flatten(1)
    stream = (normed if norms_residual else stream) + layer(attended, "self_attn.o_proj")
    inner = norm(stream, "midlayer.post_attention_layernorm")
    stream = stream + layer(F.silu(layer(inner, "mlp.gate_proj")) * layer(inner, "mlp.up_proj"), "mlp.down_proj")
    logits = torch.full((len(stream), VOCAB), -torch.inf)
    logits[:, drafted()] = norm(stream, "norm") @ tensors["lm_head.weight"].T
    return stream, logits


def _rotate(rows: Tensor) -> Tensor:
    heads, half = rows.view(len(rows), -1, HEAD_SIZE), HEAD_SIZE // 2
    angles = torch.arange(len(rows))[:, None] * THETA ** -(torch.arange(half) / half)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(heads[..., :half], heads[..., half:]) * turned
    return torch.cat((pairs.real, pairs.imag), -1)
