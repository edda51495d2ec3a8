"""Drafts greedily with a small model, with one call for all tokens of a step.

Calling a small model's operations one by one takes longer than computing them. The weights are kept a second time, in
float32, so only models of few weights draft this way.
"""

from collections.abc import Sequence
from ctypes import byref, c_void_p, cast
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..attention.attention_backend import KVCache
from ..attention.cache import pointers
from ..batch.input_batch import InputBatch, Ints
from ..checkpoint.families import DECODERS
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import DraftArgs, DraftLayer, load_drafts
from ..layers.embedding import load_embeddings
from ..layers.rotary import inverse_frequencies

_FEW_ROWS, _FEW_DRAFTS = 8, 8
"""Room for so many is allocated ahead."""
MOST_WEIGHTS = 1 << 20
"""Reading more of them in one thread takes longer than the calls of their operations."""


class GreedyDrafts:
    """Computes the tokens that a draft model lacks, and the most likely ones after them."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        """``config`` is one that :func:`fits` accepts. Raises :class:`KernelsUnavailable`."""
        self._kernels = load_drafts()
        self._kept: list[Tensor] = []
        self._layers = (DraftLayer * config.num_layers)(
            *(self._load_layer(checkpoint, f"model.layers.{layer}", config) for layer in range(config.num_layers))
        )
        embedding, output = load_embeddings(checkpoint, "model.embed_tokens.weight", config)
        rope = config.ropes[0]
        self._args = DraftArgs(
            layers=cast(self._layers, c_void_p),
            embedding=self._keep(embedding * config.embedding_scale),
            norm=self._keep(checkpoint.take("model.norm.weight", config.hidden_size) + config.traits.norm_shift),
            output=self._keep(self._in_panels(output)),
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
            is_bf16=config.kv_dtype == torch.bfloat16,
        )
        self._batch: InputBatch | None = None
        self._make_room(_FEW_ROWS, _FEW_DRAFTS)

    def draft(
        self,
        batch: InputBatch,
        ranges: tuple[Ints, Ints, Ints, Ints],
        kv_caches: Sequence[KVCache],
        least_confidence: float,
    ) -> list[list[int]]:
        """Compute the tokens that the drafter lacks, and draft those that follow.

        ``ranges`` are rows of the batch, the first position of each, the position after the last, and the most drafts;
        all [n]. Drafting for a row ends after the draft with which the probability that all its drafts are right falls
        below ``least_confidence``. ``kv_caches`` then hold the keys and values of all tokens but the last draft of a
        row. Returns drafts by row; a row without a finite logit gets none.
        """
        num_rows, most = len(ranges[0]), int(ranges[3].max(initial=0))
        if num_rows > self._columns.shape[1] or most > self._drafts.shape[1]:
            self._make_room(num_rows, most)
        self._bind(batch)
        for column, numbers in zip(self._columns, ranges, strict=False):
            column[:num_rows] = numbers
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            layer.keys, layer.values = pointers(kv_cache)
        args = self._args
        args.num_requests, args.least_confidence = num_rows, least_confidence
        self._kernels.draft_greedily(byref(args))
        drafts, found = self._drafts[:num_rows].tolist(), self._columns[-1, :num_rows].tolist()
        return [tokens[:count] for tokens, count in zip(drafts, found, strict=True)]

    def _make_room(self, num_rows: int, most: int) -> None:
        """Allocate what the kernel reads and writes for so many rows, each with so many drafts."""
        args = self._args
        self._columns = np.empty((5, num_rows), dtype=np.int64)
        """The ranges, and how many drafts were found."""
        self._drafts = np.empty((num_rows, most), dtype=np.int64)
        args.rows, args.starts, args.ends, args.counts, args.found = (each.ctypes.data for each in self._columns)
        args.drafts, args.most = self._drafts.ctypes.data, most

    def _bind(self, batch: InputBatch) -> None:
        """Read tokens and block tables from this batch; looking up their addresses takes longer than a comparison."""
        if self._batch is not batch:
            args, tokens, tables = self._args, batch.token_ids, batch.block_table.block_ids
            args.tokens, args.tokens_stride = tokens.ctypes.data, tokens.shape[1]
            args.tables, args.tables_stride = tables.ctypes.data, tables.shape[1]
            args.block_size = batch.block_table.block_size
            self._batch = batch

    def _load_layer(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> DraftLayer:
        hidden, inner, shift = config.hidden_size, config.intermediate_size, config.traits.norm_shift
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

        def matrix(names: Sequence[str], outputs: Sequence[int], inputs: int) -> int:
            pairs = zip(names, outputs, strict=True)
            return self._keep(
                self._in_panels(torch.cat([checkpoint.take(f"{prefix}.{name}.weight", n, inputs) for name, n in pairs]))
            )

        def norm(name: str) -> int:
            return self._keep(checkpoint.take(f"{prefix}.{name}.weight", hidden) + shift)

        return DraftLayer(
            input_norm=norm("input_layernorm"),
            qkv=matrix([f"self_attn.{name}_proj" for name in "qkv"], (queries, keys, keys), hidden),
            head_norm=self._load_head_norm(checkpoint, prefix, config),
            out=matrix(["self_attn.o_proj"], (hidden,), queries),
            post_norm=norm("post_attention_layernorm"),
            gate_up=matrix(["mlp.gate_proj", "mlp.up_proj"], (inner, inner), hidden),
            down=matrix(["mlp.down_proj"], (hidden,), inner),
        )

    def _load_head_norm(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig) -> int | None:
        if config.traits.qk_norm is None:
            return None
        parts = [("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)]
        weights = [
            checkpoint.take(f"{prefix}.self_attn.{name}.weight", config.head_size).expand(heads, -1)
            for name, heads in parts
        ]
        return self._keep(torch.cat(weights) + config.traits.norm_shift)

    def _in_panels(self, weight: Tensor) -> Tensor:
        """Arrange [out, in] for the kernel as [panels, in, outputs of a panel]."""
        outputs, inputs = weight.shape
        panel = self._kernels.panel_outputs()
        padded = torch.zeros(-(-outputs // panel) * panel, inputs)
        padded[:outputs] = weight
        return padded.view(-1, panel, inputs).transpose(1, 2)

    def _keep(self, tensor: Tensor) -> int:
        """Keep a float32 copy of a tensor. Returns its address."""
        self._kept.append(tensor.to(torch.float32).contiguous().clone())
        return self._kept[-1].data_ptr()


def load_greedy_drafts(path: Path, config: ModelConfig, device: torch.device) -> GreedyDrafts | None:
    """Load a checkpoint's weights for :class:`GreedyDrafts`. None: the model computes every draft."""
    if device.type != "cpu" or not fits(config):
        return None
    try:
        with Checkpoint(path, config.dtype, device, config.scheme) as checkpoint:
            return GreedyDrafts(checkpoint, config)
    except KernelsUnavailable:
        return None


def fits(config: ModelConfig) -> bool:
    """Return whether the kernel computes models of this configuration, and faster than the model itself does."""
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
        and _num_weights(config) <= MOST_WEIGHTS
    )


def _num_weights(config: ModelConfig) -> int:
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_size
    by_layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return config.vocab_size * config.hidden_size + config.num_layers * by_layer
