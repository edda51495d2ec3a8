"""The place of this process among the ranks of its engine, and its ways to the others, with hidden states from stage to
stage among them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tokenloom.engine_core.data.config import EplbConfig, ParallelConfig
from tokenloom.engine_core.data.parallel_config import ExpertPeers

from ..call_recording.recorder import current_recorder
from .experts.expert_exchange import ExpertExchange
from .group import ALONE, Peers, RankGroup
from .sharding import ONLY_PLACE, RankPlace, place_of

if TYPE_CHECKING:  # engines that do not move experts import none of it
    from .experts.balancer import ExpertBalancer
    from .experts.planner import Ints
    from .experts.transfer import MovableExperts


@dataclass(frozen=True, slots=True)
class Ranks:
    """Holds the place of this rank, and its ways to the others."""

    place: RankPlace = ONLY_PLACE
    group: RankGroup = ALONE
    """The ranks that compute the same layers."""
    prefill: RankGroup = ALONE
    """The ranks that divide long prompts."""
    tensors: Peers | None = None
    """Carries tensors of the device between stages; None: there is one stage."""
    tokens: Peers | None = None
    """Carries drawn tokens, on the CPU; None: this rank is alone."""
    experts: ExpertExchange | None = None
    """Carries rows between the engines of a data-parallel group; None: this engine has all experts."""
    balancer: "ExpertBalancer | None" = None
    """Moves experts between ranks; None: they stay where they are."""

    def place_experts(self, peers: ExpertPeers) -> None:
        """Leave the workers that share the experts, and take the places that this one has among ``peers``."""
        exchange = self.spread_experts
        exchange.place(peers)
        if self.balancer is not None:
            self.balancer.regroup(exchange.num_parts, exchange.rank)

    def join_experts(self, peers: ExpertPeers) -> None:
        """Join the workers that share the experts, and wait for them. Raises :class:`PeerLostError`."""
        link = self.spread_experts.join(peers)
        if self.balancer is not None:
            self.balancer.join(link)

    @property
    def spread_experts(self) -> ExpertExchange:
        """Return :attr:`experts` of an engine that has a part of them."""
        assert self.experts is not None, "the experts are not spread over engines"
        return self.experts

    def balance(self, experts: "Callable[[], Sequence[MovableExperts]]", loads: "Callable[[], Ints]") -> None:
        """Set which experts are moved, if any are, as :meth:`ExpertBalancer.use`."""
        if self.balancer is not None:
            self.balancer.use(experts, loads)

    def weights_changed(self) -> None:
        """Note that the weights were dropped, or that others were loaded."""
        if self.balancer is not None:
            self.balancer.weights_changed()

    def forward_passed(self) -> None:
        """Note that the ranks have computed a step together."""
        if self.balancer is not None:
            self.balancer.stepped()

    @property
    def others(self) -> list[int]:
        """Return the ranks of the engine without the one that draws."""
        place = self.place
        count = place.tensor_size * place.num_stages * place.prefill_size
        return [rank for rank in range(count) if rank != place.output_rank]


ONLY_RANK: Final = Ranks()


def make_balancer(parallel: ParallelConfig, place: RankPlace) -> "ExpertBalancer | None":
    """Return what moves the experts of this rank; None: they stay where they are."""
    if not parallel.enable_eplb:
        return None
    from .experts.balancer import ExpertBalancer

    return ExpertBalancer(parallel.eplb_config or EplbConfig(), place.num_expert_ranks, place.data_rank)


def join_ranks(parallel: ParallelConfig, device: torch.device, *, cuts_vocabulary: bool = True) -> Ranks:
    """Join the other ranks of the engine, and wait for them; a rank that is alone does nothing. ``cuts_vocabulary``: as
    in :class:`~.sharding.Shard`; the same on every rank.

    Raises ``ValueError`` if the configuration names several workers and none of their places, or experts that are
    spread over engines with GPUs.
    """
    place = replace(place_of(parallel), cuts_vocabulary=cuts_vocabulary)
    if place.is_whole:
        return ONLY_RANK
    exchange = None
    if place.data_size > 1:
        if device.type != "cpu":
            raise ValueError(
                "enable_expert_parallel: experts are spread over engines on CPUs only so far; use "
                "--tensor-parallel-size to spread them over the workers of an engine"
            )
        exchange = ExpertExchange(place.data_rank, place.data_size, place.tensor_rank, place.tensor_size, place.stage)
    balancer = make_balancer(parallel, place)
    if place.is_alone:
        return Ranks(place, experts=exchange, balancer=balancer)
    if not parallel.rendezvous:
        raise ValueError(
            f"distributed_executor_backend: uni runs one worker, but the engine has {parallel.world_size}; use mp"
        )
    from .torch_group import join  # here, so that a rank that is alone pays nothing for it

    # Experts that are spread over engines move by the links of the exchange.
    group, prefill, tensors, tokens = join(parallel, place, device, balancer if exchange is None else None)
    return Ranks(place, group, prefill, tensors, tokens, exchange, balancer)


class Stage:
    """Joins the layers of this rank to those of the stages before and after it."""

    def __init__(self, ranks: Ranks, hidden_size: int, dtype: torch.dtype) -> None:
        place = ranks.place
        self._peers = ranks.tensors
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._before, self._behind = place.rank_of_stage(place.stage - 1), place.rank_of_stage(place.stage + 1)

    def receive(self, num_tokens: int, count: int = 1) -> Tensor:
        """Return what the stage before has sent: hidden states [num_tokens, count * hidden_size]."""
        assert self._peers is not None, "one stage computes all layers"
        shape, recorder = (num_tokens, count * self._hidden_size), current_recorder()
        if recorder is None:
            return self._peers.receive(shape, self._dtype, self._before)
        hidden = torch.empty(shape, dtype=self._dtype)
        recorder.exchange(self._receive_into, hidden, reads=False, writes=True)
        return hidden

    def send(self, hidden: Tensor) -> Tensor:
        """Send the hidden states [T, hidden_size] to the stage behind, and return them. Nothing may change them any
        more."""
        assert self._peers is not None, "one stage computes all layers"
        if (recorder := current_recorder()) is None:
            self._peers.send(hidden, self._behind)
        else:
            recorder.exchange(self._send_copy, hidden, reads=True, writes=False)
        return hidden

    def _receive_into(self, hidden: Tensor) -> None:
        assert self._peers is not None
        hidden.copy_(self._peers.receive(hidden.shape, hidden.dtype, self._before))

    def _send_copy(self, hidden: Tensor) -> None:
        """Send the content of memory in which the next step is computed while the transfer may still read."""
        assert self._peers is not None
        self._peers.send(hidden.clone(), self._behind)
