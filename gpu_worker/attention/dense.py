"""Computes attention whose scores PyTorch's fused operation does not know: with a limit on scores, or with sinks."""

import torch
from torch import Tensor

from .score_rule import ScoreRule


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rule: ScoreRule) -> Tensor:
    """Return [n, num_heads, q, head_size]: queries of that shape attend over [n, num_kv_heads, s, head_size].

    The scores are float32 and lie in memory as a whole. ``mask``, which broadcasts to [n, num_heads, q, s], is True
    where a query sees a key; None: each sees all.
    """
    num_heads = query.shape[1]
    key, value = (x.repeat_interleave(num_heads // key.shape[1], dim=1).float() for x in (key, value))
    scores = query.float() @ key.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = rule.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).to(query.dtype)
