"""Loads the experts of a layer as two tensors, for a device that computes all of them with one product each."""

from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.expert_switches import ExpertSwitches
from ..checkpoint.model_config import FP8, ModelConfig
from ..checkpoint.weights import Checkpoint
from ..kernels.gpu_kernels import uses_triton
from ..layers.fp8_linear import round_weight
from ..parallel.sharding import WHOLE
from .mlp import MLPNames


class GroupedExperts(Protocol):
    """Computes all experts of a layer."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of what the experts ``chosen`` [T, k] compute of x, times ``weights``."""


def can_group(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether the device groups experts: on a GPU, without stored quantized weights, adapters and biases, and
    on one rank."""
    plain = config.scheme is None and checkpoint.adapt is None and not config.mlp_bias
    computes = config.quantization in (None, FP8)
    is_whole = config.shard == WHOLE and (config.experts is None or config.experts.own is None)
    return plain and computes and is_whole and uses_triton(checkpoint.device)


def load_grouped(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, experts: ExpertSwitches, names: MLPNames
) -> GroupedExperts:
    """Load the experts below ``prefix``. Raises ``ValueError`` as :meth:`Checkpoint.take`."""
    from ..layers.triton_experts import TritonExperts

    count, size, hidden = experts.count, experts.intermediate_size, config.hidden_size
    gate_up = _Matrices(count, 2 * size, hidden, checkpoint, config)
    down = _Matrices(count, hidden, size, checkpoint, config)
    for expert in range(count):
        at = f"{prefix}.experts.{expert}"
        gates, ups = (checkpoint.take(f"{at}.{name}.weight", size, hidden) for name in (names.gate, names.up))
        gate_up.put(expert, torch.cat((gates, ups)))
        down.put(expert, checkpoint.take(f"{at}.{names.down}.weight", hidden, size))
    return TritonExperts(gate_up.values, down.values, config.hidden_act, gate_up.scales, down.scales)


class _Matrices:
    """Holds a matrix of each expert, in the model's dtype or rounded to 8-bit floats as they come."""

    def __init__(self, count: int, outputs: int, inputs: int, checkpoint: Checkpoint, config: ModelConfig) -> None:
        rounds, device = config.quantization == FP8, checkpoint.device
        self.values = torch.empty(
            count, outputs, inputs, dtype=torch.float8_e4m3fn if rounds else checkpoint.dtype, device=device
        )
        self.scales = torch.empty(count, outputs, dtype=torch.float32, device=device) if rounds else None

    def put(self, expert: int, matrix: Tensor) -> None:
        """Keep a matrix [outputs, inputs]."""
        if self.scales is None:
            self.values[expert] = matrix
        else:
            self.values[expert], self.scales[expert] = round_weight(matrix)
