"""Describes the model of an engine whose workers each hold a part of it."""

from collections.abc import Sequence

from msgspec.structs import replace

from ..data.model_info import ModelInfo
from .rank_pools import merged_layout


def merged_info(models: Sequence[ModelInfo], output_rank: int) -> ModelInfo:
    """Return what the core needs of these workers' models, in order of their ranks.

    Every pool has the same number of blocks, so a block is counted with the size that it has in the rank with the most
    layers.
    """
    return replace(
        models[output_rank],
        kv_bytes_per_token=max(model.kv_bytes_per_token for model in models),
        kv_layout=merged_layout([model.kv_layout for model in models]),
        fall_backs=list(dict.fromkeys(each for model in models for each in model.fall_backs)),
    )
