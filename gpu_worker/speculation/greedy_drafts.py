"""Drafts greedily with a small model or an EAGLE head, with one call for all tokens of a step.

Calling a small model's operations one by one takes longer than computing them. The weights are kept a second time, so
only models of few weights draft this way.
"""

from collections.abc import Sequence
from ctypes import byref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..attention.attention_backend import KVCache
from ..attention.cache import pointers
from ..batch.input_batch import InputBatch
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.compiler import KernelsUnavailable
from .draft_weights import DraftWeights, fits

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
