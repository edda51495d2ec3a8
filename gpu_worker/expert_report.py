"""Reports which experts computed the tokens of a step, and how tokens are spread over all experts."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.messages import ExpertBalance, ExpertLoads, RoutedExperts

from .batch.input_batch import StepInputs
from .layers.expert_routes import ExpertRoutes

if TYPE_CHECKING:  # engines that do not move experts import none of it
    from .parallel.experts.balancer import BalanceStats


def routed_experts(
    routes: ExpertRoutes, rows: set[int], inputs: StepInputs, chosen: npt.NDArray[np.unsignedinteger]
) -> dict[str, RoutedExperts]:
    """Return the experts of the requests in the batch's ``rows``; ``chosen`` [T, num_layers, top_k]: of all tokens."""
    result = {}
    for index, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
        if row in rows:
            begin, end = inputs.cu_query_lens[index : index + 2].tolist()
            result[req_id] = RoutedExperts(
                int(inputs.positions[begin]),
                routes.num_layers,
                routes.top_k,
                chosen.itemsize,
                chosen[begin:end].tobytes(),
            )
    return result


def expert_loads(routes: ExpertRoutes, balance: "BalanceStats | None" = None) -> ExpertLoads:
    """Return how the tokens of all steps were spread. ``balance``: what was done to balance the ranks, if anything."""
    tokens, imbalance = routes.loads()
    loads = ExpertLoads(tokens.tolist(), imbalance.tolist())
    if balance is not None:
        loads.balance = ExpertBalance(balance.balancedness, balance.num_plans, balance.num_moved)
    return loads
