"""Drafts greedily with a small model or an EAGLE head, with one call for all tokens of a step.

Calling a small model's operations one by one takes longer than computing them. The weights are kept a second time, so
only models of few weights draft this way.
"""

from collections.abc import Sequence
from ctypes import Array, byref, c_void_p, cast
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.attention_backend import KVCache
from ..attention.cache import pointers
from ..batch.input_batch import InputBatch
from ..checkpoint.files.architectures import DECODERS
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.compiler import KernelsUnavailable
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


_FEW_ROWS, _FEW_DRAFTS = 8, 8
"""Room for so many is allocated ahead."""
_FEW_PRODUCTS = 1 << 23
"""So many multiplications take as long as the calls of a small model's operations."""


class DraftRange(NamedTuple):
    """Says what is computed for a request, and how many drafts follow."""

    row: int
    """Of the batch."""
    start: int
    end: int
    """Positions: the tokens of [start, end) are computed."""
    most: int
    """Drafts."""


StateAddresses = tuple[int, int]
"""Where the model's state before the first token of a range lies, 0 for zeros, and where those from it on begin."""


class GreedyDrafts:
    """Computes the tokens that a draft model lacks, and the most likely ones after them."""

    def __init__(self, weights: DraftWeights) -> None:
        self._weights = weights
        self.most_tokens = _FEW_PRODUCTS // weights.num_by_token
        """Computing more tokens of a request one after the other takes longer than all of them at once."""
        self._args = weights.args
        self._where = byref(weights.args)
        self._batch: InputBatch | None = None
        self._caches_at = 0
        self._make_room(_FEW_ROWS, _FEW_DRAFTS)

    def draft(
        self,
        batch: InputBatch,
        ranges: Sequence[DraftRange],
        kv_caches: Sequence[KVCache],
        least_confidence: float,
        states: Sequence[StateAddresses] = (),
    ) -> list[list[int]]:
        """Compute the tokens that the drafter lacks, and draft those that follow.

        Drafting for a range ends after the draft with which the probability that all its drafts are right falls below
        ``least_confidence``. ``kv_caches`` then hold the keys and values of all tokens but the last draft of a range.
        ``states``: of an EAGLE head, by range. Returns drafts by range; one without a finite logit gets none. Raises
        ``AssertionError`` for rows, tokens and blocks that are not there.
        """
        num_ranges, most = len(ranges), max((each.most for each in ranges), default=0)
        if num_ranges > self._columns.shape[1] or most > self._drafts.shape[1]:
            self._make_room(num_ranges, most)
        self._bind(batch, kv_caches)
        self._columns[:4, :num_ranges] = np.array(ranges, dtype=np.int64).T
        if states:
            self._columns[5:, :num_ranges] = np.array(states, dtype=np.int64).T
        args = self._args
        args.num_requests, args.least_confidence = num_ranges, least_confidence
        drafted = self._weights.kernels.draft_greedily(self._where)
        assert drafted == num_ranges, f"{ranges[drafted]}: the batch, its blocks or the vocabulary lack some of it"
        drafts, found = self._drafts[:num_ranges].tolist(), self._columns[4, :num_ranges].tolist()
        return [tokens[:count] for tokens, count in zip(drafts, found, strict=True)]

    def _make_room(self, num_ranges: int, most: int) -> None:
        """Allocate what the kernel reads and writes for so many ranges, each with so many drafts."""
        args = self._args
        self._columns = np.zeros((7, num_ranges), dtype=np.int64)
        """The ranges, how many drafts were found, and the addresses of states."""
        self._drafts = np.empty((num_ranges, most), dtype=np.int64)
        columns = (each.ctypes.data for each in self._columns)
        args.rows, args.starts, args.ends, args.counts, args.found, args.before, args.states = columns
        args.drafts, args.most = self._drafts.ctypes.data, most

    def _bind(self, batch: InputBatch, kv_caches: Sequence[KVCache]) -> None:
        """Read from this batch and these caches; looking up their addresses takes longer than a comparison."""
        args = self._args
        if self._batch is not batch:
            tokens, tables = batch.token_ids, batch.block_table.block_ids
            args.tokens, args.tokens_stride = tokens.ctypes.data, tokens.shape[1]
            args.tables, args.tables_stride = tables.ctypes.data, tables.shape[1]
            args.block_size, args.num_rows = batch.block_table.block_size, len(tokens)
            self._batch = batch
        if self._caches_at != (caches_at := kv_caches[0].data_ptr()):
            for layer, kv_cache in zip(self._weights.layers, kv_caches, strict=True):
                layer.keys, layer.values = pointers(kv_cache)
            args.num_blocks = kv_caches[0].shape[1]
            self._caches_at = caches_at


def load_greedy_drafts(path: Path, config: ModelConfig, device: torch.device) -> GreedyDrafts | None:
    """Load a checkpoint's weights for :class:`GreedyDrafts`. None: the model computes every draft."""
    if device.type != "cpu" or not fits(config):
        return None
    try:
        with Checkpoint(path, config.dtype, device, config.scheme) as checkpoint:
            return GreedyDrafts(DraftWeights.of_decoder(checkpoint, config))
    except KernelsUnavailable:
        return None
