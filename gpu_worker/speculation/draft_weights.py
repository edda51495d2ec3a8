"""Arranges the weights of small draft models and EAGLE heads for the kernel that drafts with them."""

from collections.abc import Sequence
from ctypes import Array, c_void_p, cast

import torch
from torch import Tensor

from ..checkpoint.families import DECODERS
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.library import DraftArgs, DraftLayer, load_drafts
from ..layers.embedding import load_embeddings
from ..layers.rotary import inverse_frequencies

MOST_WEIGHTS = 1 << 20
"""Reading more of them in one thread takes longer than the calls of their operations."""


class DraftWeights:
    """Holds a second copy of the weights, and the arguments of the kernel that describe them."""

    def __init__(self, config: ModelConfig) -> None:
        """``config`` is one that :func:`fits` accepts. Raises :class:`KernelsUnavailable`."""
        self.kernels = load_drafts()
        self._config = config
        self._is_bf16 = config.dtype == torch.bfloat16
        self.num_by_token = 0
        """How many weights a token is multiplied with before its logits."""
        self._kept: list[Tensor] = []
        rope = config.ropes[0]
        self.layers: Array[DraftLayer] = (DraftLayer * config.num_layers)()
        self.args = DraftArgs(
            layers=cast(self.layers, c_void_p),
            frequencies=self._keep(inverse_frequencies(rope)),
            num_layers=config.num_layers,
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            cache_head_size=config.cache_head_size,
            eps=config.norm_eps,
            scale=config.attention_scales[0],
            rotation_factor=rope.attention_factor,
            is_bf16=self._is_bf16,
        )

    @classmethod
    def of_decoder(cls, checkpoint: Checkpoint, config: ModelConfig) -> "DraftWeights":
        """Take those of a whole model."""
        made = cls(config)
        for number in range(config.num_layers):
            made.layers[number] = made._load_layer(checkpoint, f"model.layers.{number}", "input_layernorm")
        embedding, output = load_embeddings(checkpoint, "model.embed_tokens.weight", config)
        made.num_by_token = _num_by_token(config, is_head=False)
        made._set_ends(embedding * config.embedding_scale, output)
        made.args.norm = made._load_norm(checkpoint, "model.norm")
        return made

    @classmethod
    def of_head(cls, checkpoint: Checkpoint, config: ModelConfig, embedding: Tensor, output: Tensor) -> "DraftWeights":
        """Take those of a head. ``embedding`` and ``output`` [vocab_size, hidden_size]: those of the model that it
        drafts for."""
        made, size = cls(config), config.hidden_size
        made.num_by_token = _num_by_token(config, is_head=True)
        made.args.fc = made._matrix(checkpoint.take("fc.weight", size, 2 * size))
        made.layers[0] = made._load_layer(checkpoint, "layers.0", "")
        made._set_ends(embedding, output)
        return made

    def _set_ends(self, embedding: Tensor, output: Tensor) -> None:
        self._kept.append(embedding.to(self._config.dtype).contiguous().clone())
        self.args.embedding = self._kept[-1].data_ptr()
        self.args.output = self._matrix(output)

    def _load_layer(self, checkpoint: Checkpoint, prefix: str, input_norm: str) -> DraftLayer:
        """``input_norm``: the name of the norm before attention; empty: there is none."""
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

        def matrix(names: Sequence[str], outputs: Sequence[int], inputs: int) -> int:
            pairs = zip(names, outputs, strict=True)
            return self._matrix(
                torch.cat([checkpoint.take(f"{prefix}.{name}.weight", count, inputs) for name, count in pairs])
            )

        return DraftLayer(
            input_norm=self._load_norm(checkpoint, f"{prefix}.{input_norm}") if input_norm else None,
            qkv=matrix([f"self_attn.{name}_proj" for name in "qkv"], (queries, keys, keys), hidden),
            head_norm=self._load_head_norm(checkpoint, prefix),
            out=matrix(["self_attn.o_proj"], (hidden,), queries),
            post_norm=self._load_norm(checkpoint, f"{prefix}.post_attention_layernorm"),
            gate_up=matrix(["mlp.gate_proj", "mlp.up_proj"], (inner, inner), hidden),
            down=matrix(["mlp.down_proj"], (hidden,), inner),
        )

    def _load_norm(self, checkpoint: Checkpoint, name: str) -> int:
        weight = checkpoint.take(f"{name}.weight", self._config.hidden_size)
        return self._keep(weight + self._config.traits.norm_shift)

    def _load_head_norm(self, checkpoint: Checkpoint, prefix: str) -> int | None:
        config = self._config
        if config.traits.qk_norm is None:
            return None
        parts = [("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)]
        weights = [
            checkpoint.take(f"{prefix}.self_attn.{name}.weight", config.head_size).expand(heads, -1)
            for name, heads in parts
        ]
        return self._keep(torch.cat(weights) + config.traits.norm_shift)

    def _matrix(self, weight: Tensor) -> int:
        """Keep a copy of [out, in] as the kernel reads it. Returns its address."""
        outputs, inputs = weight.shape
        arranged = torch.empty(self.kernels.matrix_bytes(outputs, inputs, self._is_bf16), dtype=torch.uint8)
        plain = weight.to(self._config.dtype).to(torch.float32).contiguous()
        self.kernels.arrange_matrix(plain.data_ptr(), arranged.data_ptr(), outputs, inputs, self._is_bf16)
        self._kept.append(arranged)
        return arranged.data_ptr()

    def _keep(self, tensor: Tensor) -> int:
        """Keep a float32 copy of a tensor. Returns its address."""
        self._kept.append(tensor.to(torch.float32).contiguous().clone())
        return self._kept[-1].data_ptr()


def fits(config: ModelConfig, *, is_head: bool = False) -> bool:
    """Return whether the kernel computes models of this configuration, and faster than the model itself does.

    ``is_head``: the configuration is that of an EAGLE head.
    """
    if config.family not in DECODERS or len(set(config.ropes)) != 1 or len(set(config.attention_scales)) != 1:
        return False
    traits = config.traits
    is_plain = traits.norm_order == "before" and traits.qk_norm in (None, "head") and not traits.is_fused
    has_biases = config.qkv_bias or config.attention_output_bias or config.mlp_bias
    others = (config.experts, config.opt, config.quantization, config.scheme)
    limits = (config.attention_softcap, config.logit_softcap, *config.sliding_windows)
    return (
        is_plain
        and not (has_biases or config.kv_sources)
        and all(each is None for each in (*others, *limits))
        and config.hidden_act in ("silu", "swish")
        and config.kv_dtype != torch.int8
        and config.vocab_size * config.hidden_size + _num_by_token(config, is_head) <= MOST_WEIGHTS
    )


def _num_by_token(config: ModelConfig, is_head: bool) -> int:
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    by_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    joined = 2 * config.hidden_size**2 if is_head else 0
    return config.num_layers * by_layer + joined
