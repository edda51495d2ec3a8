"""Decides at which step the experts of a layer move. Each rank decides alike, because it counts the same steps."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenloom.engine_core.data.errors import PeerLostError
from tokenloom.engine_core.data.parallel_config import EplbConfig

from .planner import Ints, LayerPlacement, plan_placement, rank_loads
from .transfer import LayerTransfer, MovableExperts, MoveList, WeightLink, moves_between

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BalanceStats:
    """Holds what was observed and done.

    Attributes:
        balancedness: The mean load of the ranks divided by that of the busiest one, over all layers, in the steps
            before the latest plan; 0 before the first one. 1 is even.
        num_moved: Experts that were put into places of this rank.
        num_plans: Plans that were made.
    """

    balancedness: float = 0.0
    num_moved: int = 0
    num_plans: int = 0


class ExpertBalancer:
    """Moves the experts of a model on one rank. Every rank calls :meth:`stepped` after each forward pass that all of
    them compute; in between, :meth:`LayerPlacement.spread` sends rows to the places that hold their experts.

    Every ``step_interval`` steps the ranks add their loads. Then they handle the layers one after the other: a step
    plans a layer, the following ones send its weights, and after the last byte all ranks use them from the same step
    on. So a step waits for what the one before it began to send, and plans at most one layer.

    Attributes:
        stats: What was done so far.
    """

    def __init__(self, config: EplbConfig, size: int, source: int) -> None:
        """``size``: ranks over which the experts are spread. ``source``: as in :class:`LayerPlacement`."""
        self.stats = BalanceStats()
        self._config, self._size, self._source = config, size, source
        self._link: WeightLink | None = None
        self._layers: list[LayerPlacement] = []
        self._num_experts = 0
        self._experts: Callable[[], Sequence[MovableExperts]] = list
        self._loads: Callable[[], Ints] = lambda: np.zeros((0, 0), np.int64)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._step = 0
        self._marks: deque[Ints] = deque(maxlen=-(-self._config.window_size // self._config.step_interval))
        self._to_plan: deque[int] = deque()  # bounded by the layers
        self._planned_loads: Ints = np.zeros((0, 0), np.int64)
        self._transfer: LayerTransfer | None = None
        self._number = 0  # the layer of the transfer
        self._planned: Ints = np.zeros(0, np.int64)  # its placement afterwards
        self._is_stale = False

    def layer(self, number: int, num_experts: int) -> LayerPlacement:
        """Return the placement of a layer; layers with experts are numbered from 0."""
        self._num_experts = num_experts
        while len(self._layers) <= number:
            self._layers.append(LayerPlacement(num_experts, self.num_places(num_experts), self._source))
        return self._layers[number]

    def num_places(self, num_experts: int) -> int:
        """Return how many places for experts all ranks have together: one for each and for the configured copies, of
        which a rank needs no two of an expert, and as many more as make them a multiple of the ranks."""
        wanted = num_experts + min(self._config.num_redundant_experts, num_experts * (self._size - 1))
        return -(-wanted // self._size) * self._size

    def regroup(self, size: int, source: int) -> None:
        """Place the experts anew over another number of ranks, as if no load were known. All ranks do so after the same
        step, and then call :meth:`join`."""
        self._link, self._transfer = None, None
        self._size, self._source = size, source
        placed, self._layers = self._layers, []
        for number in range(len(placed)):
            self.layer(number, self._num_experts)
        self._begin_anew()

    def join(self, link: WeightLink) -> None:
        """Begin to count steps with the other ranks."""
        self._link = link

    def use(self, experts: Callable[[], Sequence[MovableExperts]], loads: Callable[[], Ints]) -> None:
        """Set what is balanced.

        Args:
            experts: Returns the layers with experts.
            loads: Returns [layers, num_experts] tokens of each expert since the weights were loaded.
        """
        self._experts, self._loads = experts, loads

    def weights_changed(self) -> None:
        """Note that the weights were dropped, or that others were loaded."""
        self._marks.clear()
        if self._transfer is not None:  # some of its bytes are of the weights before
            self._is_stale = True
            # The next step notices a lost rank too. A call that has changed the weights must not fail for it: after
            # sleep the KV cache stayed, and after a reload the new weights counted as lost.
            with contextlib.suppress(PeerLostError):
                self._transfer.give_up()

    def stepped(self) -> None:
        """Count a step, and do what is due after it."""
        if self._link is None or not self._layers:  # a stage may have no layer with experts
            return
        config, self._step = self._config, self._step + 1
        if self._transfer is not None:
            self._advance(self._link, self._transfer)
        elif self._to_plan:
            self._plan_layer(self._link, self._to_plan.popleft())
        elif self._step % config.step_interval == 0:
            self._begin(self._link)
        if (self._step + config.window_size) % config.step_interval == 0:
            self._marks.append(self._loads())

    def _begin(self, link: WeightLink) -> None:
        """Add the loads of all ranks, and let the next steps plan the layers."""
        loads = self._loads()
        is_full = len(self._marks) == self._marks.maxlen
        since = self._marks[0] if is_full else np.zeros_like(loads)  # the window is longer than what was counted
        self._planned_loads = link.add(torch.from_numpy(loads - since)).numpy()
        self._to_plan.extend(range(len(self._layers)))
        self.stats.num_plans += 1
        self._observe(link)

    def _observe(self, link: WeightLink) -> None:
        layers = zip(self._planned_loads, self._layers, strict=True)
        ranks = np.stack([rank_loads(loads, layer.logical, self._size) for loads, layer in layers])
        busiest = int(ranks.max(1).sum())
        if busiest:
            self.stats.balancedness = float(ranks.sum()) / self._size / busiest
        if self._config.log_balancedness and link.rank == 0:
            log.info("experts: step %d, balancedness %.3f", self._step, self.stats.balancedness)

    def _plan_layer(self, link: WeightLink, number: int) -> None:
        layer, experts = self._layers[number], self._experts()[number]
        self._planned = plan_placement(self._planned_loads[number], layer.logical, self._size)
        per_rank = len(layer.logical) // self._size
        moves = moves_between(layer.logical, self._planned, per_rank)
        if moves:
            sizes = torch.zeros(link.size, dtype=torch.int64)
            sizes[link.rank] = experts.packed_bytes()
            listed = MoveList(moves, per_rank, int(link.add(sizes).max()), self._config.move_bytes)
            self._number, self._transfer = number, LayerTransfer(link, listed)
            self._transfer.post(experts)

    def _advance(self, link: WeightLink, transfer: LayerTransfer) -> None:
        """Send more of a layer, or use what has arrived, unless a rank has other weights than it had before."""
        experts = self._experts()[self._number]
        transfer.settle()
        # A rank may have loaded other weights since the move began. All have to agree before they use what arrived: a
        # rank with another placement would send rows to a rank without their expert.
        if int(link.add(torch.tensor([int(self._is_stale)]))):
            self._transfer, self._is_stale = None, False
            self._to_plan.clear()
            experts.forget_prepared()
            return
        transfer.prepare(experts)
        if not transfer.is_complete:
            transfer.post(experts)
            return
        # All experts of a layer at once, and on every rank after the same step: no message says that a placement is
        # valid from now on.
        self.stats.num_moved += experts.switch()
        self._layers[self._number].change(self._planned)
        self._transfer = None
