"""Cuts a step's attention into the work of single programs, and chooses the shape of a program."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .attention_backend import IntArray

_PROGRAMS = 264
"""Two for each multiprocessor of an H100: enough loads are in flight to use its memory's speed."""
_MOST_SPLITS = 32
_FEW_ROWS = 16
"""Steps of more tokens are not split: merging would be one kernel more, and they have enough programs."""


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Holds how much one program of the attention kernel computes, and with what resources."""

    rows: int
    """Queries times query heads of one KV head."""
    tile: int
    """Keys that it reads at a time."""
    warps: int
    stages: int
    """Tiles that are loaded ahead, counting the one that is computed."""


def program_shape(most_queries: int, group: int, padded_head: int, dtype: torch.dtype) -> ProgramShape:
    """Choose the shape for a step whose requests have at most ``most_queries`` queries each.

    Decodes wait for memory: one matrix instruction of 16 rows is enough. Longer queries take the tensor cores' wide
    instruction, which has 64 rows for each 4 warps. ``group``: query heads that share a KV head.
    """
    if dtype == torch.float32:  # without tensor cores; a tile of keys takes twice the memory
        return ProgramShape(max(16, _power_of_2(group)), 16 if padded_head > 128 else 32, 4, 2)
    tile = 32 if padded_head > 128 else 64
    if most_queries * group <= 16:
        return ProgramShape(16, tile, 4, 3)
    if most_queries == 1:
        return ProgramShape(_power_of_2(group), tile, 4, 3)
    return ProgramShape(64, tile, 4, 2) if padded_head > 128 else ProgramShape(128, tile, 8, 3)


def num_splits(num_tokens: int, num_entries: int, num_kv_heads: int, longest: int, tile: int) -> int:
    """Return over how many programs the keys of a query are split: a power of two. ``longest``: tokens of a request."""
    if num_tokens > _FEW_ROWS:
        return 1
    wanted = min(_PROGRAMS // max(1, num_entries * num_kv_heads), -(-longest // tile), _MOST_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def work_entries(query_lens: IntArray, queries: int) -> npt.NDArray[np.int32]:
    """Return [entries, 2]: request and first query of each program's work, ``queries`` queries at a time.

    The last queries of a prompt come first, because they see most keys and take longest.
    """
    counts = -(-query_lens // queries)
    requests = np.repeat(np.arange(len(query_lens)), counts)
    firsts = (np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    entries: npt.NDArray[np.int32] = np.stack((requests, firsts), axis=1).astype(np.int32)
    return entries if len(entries) == len(query_lens) else np.ascontiguousarray(entries[::-1])


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
