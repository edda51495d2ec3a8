"""Bidirectional attention over the rows of a step, prompt by prompt."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, begins: Sequence[int], window: int | None = None) -> Tensor:
    """Let each token attend to all tokens of its prompt, or to those at most ``window`` positions away.

    Args:
        query: [T, num_heads, head_size], as are ``key`` and ``value``.
        begins: [R + 1] where the tokens of each prompt begin, from 0 to T.

    Returns [T, num_heads * head_size].
    """
    parts = []
    for begin, end in itertools.pairwise(begins):
        heads = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        mask = None
        if window is not None and end - begin > window + 1:
            positions = torch.arange(end - begin, device=query.device)
            mask = (positions[:, None] - positions).abs() <= window
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask=mask)
        parts.append(attended[0].transpose(0, 1).flatten(1))
    return torch.cat(parts)
