"""Loads the experts of a layer as two tensors, for a device that computes all of them with one product each."""

from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.expert_switches import ExpertSwitches
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.gpu_kernels import uses_triton
from ..parallel.sharding import WHOLE
from .mlp import MLPNames


class GroupedExperts(Protocol):
    """Computes all experts of a layer."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of what the experts ``chosen`` [T, k] compute of x, times ``weights``."""


def can_group(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether the device groups experts: on a GPU, without quantized weights, adapters and biases, and
    on one rank."""
    plain = config.quantization is None and config.scheme is None and checkpoint.adapt is None and not config.mlp_bias
    is_whole = config.shard == WHOLE and (config.experts is None or config.experts.own is None)
    return plain and is_whole and uses_triton(checkpoint.device)


def load_grouped(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, experts: ExpertSwitches, names: MLPNames
) -> GroupedExperts:
    """Load the experts below ``prefix``. Raises ``ValueError`` as :meth:`Checkpoint.take`."""
    from ..layers.triton_experts import TritonExperts

    count, size, hidden = experts.count, experts.intermediate_size, config.hidden_size
    gate_up = torch.empty(count, 2 * size, hidden, dtype=checkpoint.dtype, device=checkpoint.device)
    down = torch.empty(count, hidden, size, dtype=checkpoint.dtype, device=checkpoint.device)
    for expert in range(count):
        at = f"{prefix}.experts.{expert}"
        gate_up[expert, :size] = checkpoint.take(f"{at}.{names.gate}.weight", size, hidden)
        gate_up[expert, size:] = checkpoint.take(f"{at}.{names.up}.weight", size, hidden)
        down[expert] = checkpoint.take(f"{at}.{names.down}.weight", hidden, size)
    return TritonExperts(gate_up, down, config.hidden_act)
