"""Computes MLPs of which each token uses a few, chosen by a router."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..checkpoint.layer_state import pack_states, packed_bytes, unpack_states
from ..checkpoint.model_config import FP8, ExpertSwitches, ModelConfig, RouterSwitches
from ..checkpoint.weights import Checkpoint, ExpertAdapters, Unpackable
from ..kernels.library import uses_triton
from ..layers.expert_routes import LayerRoutes
from ..layers.fp8_linear import round_weight
from ..layers.linear import load_linear
from ..layers.quantized_experts import QuantizedExperts
from ..ops.ops import Ops
from ..parallel.experts.grouped_rows import GroupedRows, mix_experts, mix_rows
from ..parallel.sharding import WHOLE
from .mlp import MLP, GivenMLP, MLPNames

if TYPE_CHECKING:  # engines without a GPU, or that do not move experts, import none of it
    from ..layers.triton_linear import TritonExperts
    from ..parallel.experts.expert_exchange import RowTrip
    from ..parallel.experts.planner import LayerPlacement


def can_group(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Return whether the device groups experts: on a GPU, without stored quantized weights, adapters and biases, and
    on one rank."""
    plain = config.scheme is None and checkpoint.adapt is None and not config.mlp_bias
    computes = config.quantization in (None, FP8)
    is_whole = config.shard == WHOLE and (config.experts is None or config.experts.own is None)
    return plain and computes and is_whole and uses_triton(checkpoint.device)


def load_grouped(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, experts: ExpertSwitches, names: MLPNames
) -> "TritonExperts":
    """Load the experts below ``prefix``. Raises ``ValueError`` as :meth:`Checkpoint.take`."""
    from ..layers.triton_linear import TritonExperts

    count, size, hidden = experts.count, experts.intermediate_size, config.hidden_size
    gate_up = _Matrices(count, 2 * size, hidden, checkpoint, config)
    down = _Matrices(count, hidden, size, checkpoint, config)
    for expert in range(count):
        at = f"{prefix}.experts.{expert}"
        gates, ups = (checkpoint.take(f"{at}.{name}.weight", size, hidden) for name in (names.gate, names.up))
        gate_up.put(expert, torch.cat((gates, ups)))
        down.put(expert, checkpoint.take(f"{at}.{names.down}.weight", hidden, size))
    return TritonExperts(gate_up.values, down.values, config.hidden_act, gate_up.scales, down.scales)


ChooseExperts = Callable[..., tuple[Tensor, Tensor]]
"""Is ``triton_linear.choose_experts``."""


def choose_on_device() -> ChooseExperts:
    """Return what chooses the experts of tokens on a GPU by one kernel."""
    from ..layers.triton_linear import choose_experts

    return choose_experts


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


_PARTS = {
    "mixtral": ("block_sparse_moe", MLPNames(gate="w1", up="w3", down="w2")),
    "granitemoehybrid": ("block_sparse_moe", MLPNames()),
    "kimi_linear": ("block_sparse_moe", MLPNames(gate="w1", up="w3", down="w2")),
}
"""By the family: what the checkpoint calls the part of a layer with the experts, and their matrices."""


class Experts:
    """Computes the weighted sum of the experts that a router chooses for each token, and a shared expert if any."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        experts: ExpertSwitches,
        routes: LayerRoutes,
    ) -> None:
        """``prefix``: of the layer's tensors. ``routes`` records which experts were chosen."""
        part, names = _PARTS.get(config.family, (config.traits.mlp_name, MLPNames()))
        prefix = f"{prefix}.{part}"
        self._switches = experts
        self._routes = routes
        self._sigmoid = ops.rowwise(torch.sigmoid)
        is_biased = config.traits.has_mlp_bias
        router = f"{prefix}.router" if is_biased or experts.scales_inputs else f"{prefix}.gate"
        self._router = load_linear(checkpoint, [router], config.hidden_size, [experts.count], is_biased)
        self._score_bias: Tensor | None = None
        if experts.router is not None and experts.router.has_independent_scores:
            # In bfloat16 two experts' sums of score and bias, which decide between them, would often be equal.
            name = f"{prefix}.gate.e_score_correction_bias"
            self._score_bias = checkpoint.take(name, experts.count, dtype=torch.float32)
        self._group, self._exchange, self._balancer = checkpoint.group, checkpoint.exchange, checkpoint.balancer
        self._placement: LayerPlacement | None = None
        """Which expert each place has; None: place i has expert i."""
        self._load: Callable[[Checkpoint, int], MLP] | None = None
        """Loads one of the experts that :attr:`_experts` holds, by its number in the model."""
        self._experts: dict[int, MLP] = {}
        """Of this rank's places."""
        self._num_places = experts.num_places
        """On all ranks."""
        self._own = experts.own
        """The places of this rank; None: it has a part of each expert."""
        self._prepared: dict[int, MLP] = {}
        """Experts that will take over places."""
        self._grouped: QuantizedExperts | None = None
        """Computes all experts at once, in the place of :attr:`_experts`."""
        self._on_device: TritonExperts | None = None
        """Does the same on a GPU."""
        self._choose: ChooseExperts | None = None
        """Chooses the experts of tokens from the router's logits; None: PyTorch's operations do."""
        if experts.own is None and self._group.size == 1 and can_group(checkpoint, config):
            self._on_device = load_grouped(checkpoint, prefix, config, experts, names)
            self._choose = choose_on_device()
            routes.stays_on_device = True
        else:
            expert_config = config if experts.own is None else replace(config, shard=WHOLE)
            size = experts.intermediate_size

            def load(checkpoint: Checkpoint, expert: int) -> MLP:
                return MLP(checkpoint, f"{prefix}.experts.{expert}", expert_config, ops, size, names, sums=False)

            self._load = load
            self.relocate(checkpoint, {})
            if len(self._experts) == experts.count and self._group.size == 1 and self._exchange is None:
                layers = [expert.layers for expert in self._experts.values()]
                self._grouped = QuantizedExperts.of(layers, config.hidden_act)
        self._prefix = f"{prefix}.experts"
        self._adapters = None if checkpoint.adapt is None else checkpoint.adapt.experts
        self._adapted: dict[int, MLP] = {}
        """Experts that adapters change, by place, as far as they were needed."""
        self._adapted_elsewhere: AdaptedElsewhere | None = None
        if checkpoint.adapt is not None and (self._exchange is not None or self._balancer is not None):
            # This rank's rows may go to any expert, and its places may get any.
            checkpoint.adapt.spread(self._prefix, experts.count)
            if self._exchange is not None:
                sizes, like = (config.hidden_size, experts.intermediate_size), next(iter(self._experts.values()))
                self._adapted_elsewhere = AdaptedElsewhere(self._prefix, checkpoint.adapt.experts, sizes, like)
        self._shared: _Shared | MLP | None = None
        if experts.shared_size:
            self._shared = _load_shared(checkpoint, prefix, config, ops, experts)
        checkpoint.drop_read()  # a layer's experts are most of its bytes, and were copied by packing them

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        if self._switches.scales_inputs:
            out = self._routed(x * weights.to(x.dtype), torch.ones_like(weights), chosen, self._adapters)
        else:
            out = self._routed(x, weights, chosen, self._adapters)
        return self._group.all_reduce(out if self._shared is None else out + self._shared(x))

    def _routed(self, x: Tensor, weights: Tensor, chosen: Tensor, adapters: ExpertAdapters | None) -> Tensor:
        """Return the weighted sum of each token's chosen experts, those of this rank's part, as ``adapters`` change
        them."""
        if self._adapted_elsewhere is not None:
            return self._routed_elsewhere(x, weights, chosen, self._adapted_elsewhere)
        if adapters is not None and (slots := adapters.slots_of(self._prefix)) is not None:
            return self._routed_adapted(x, weights, chosen, adapters, slots)
        if self._grouped is not None:
            self._routes.record_on_device(chosen)
            return self._grouped(x, weights, chosen)
        if self._on_device is not None:
            return self._on_device(x, weights, chosen, *self._routes.places(chosen))
        grouped = GroupedRows.sort(chosen)
        self._routes.record(chosen, grouped)
        if self._placement is not None:
            grouped = self._placement.spread(grouped)
        if self._exchange is None:
            return mix_experts(x, grouped, weights, self._compute, self._own)
        rows = x[grouped.order // weights.shape[1]]
        computed = self._exchange.compute(rows, grouped, self._num_places, self._compute)
        return mix_rows(x, grouped, weights, computed)

    def _routed_adapted(
        self, x: Tensor, weights: Tensor, chosen: Tensor, adapters: ExpertAdapters, slots: npt.NDArray[np.int32]
    ) -> Tensor:
        """Do the same if adapters change the experts of some tokens, by ``slots``. The others are computed as ever:
        what a token gets depends on no other one."""
        changed = torch.from_numpy(slots >= 0).to(x.device)
        if bool(changed.all()):
            return self._mix_adapted(x, weights, chosen, adapters, slots)
        out = torch.empty_like(x)
        out[changed] = self._mix_adapted(x[changed], weights[changed], chosen[changed], adapters, slots[slots >= 0])
        out[~changed] = self._routed(x[~changed], weights[~changed], chosen[~changed], None)
        if self._routes.chosen is not None:
            self._routes.chosen = chosen
        return out

    def _mix_adapted(
        self, x: Tensor, weights: Tensor, chosen: Tensor, adapters: ExpertAdapters, slots: npt.NDArray[np.int32]
    ) -> Tensor:
        """Compute tokens that all have adapters, by the experts one after the other."""
        grouped = self._by_place(chosen)
        own = grouped if self._own is None else grouped.only(self._own)
        of_rows = slots[(own.order // chosen.shape[1]).cpu().numpy()]
        parts = iter(np.split(of_rows, np.cumsum(own.counts)[:-1]))

        def compute(place: int, rows: Tensor) -> Tensor:
            adapters.take(next(parts))
            return self._adapted_expert(place, adapters)(rows)

        try:
            return mix_experts(x, grouped, weights, compute, self._own)
        finally:
            adapters.take(None)

    def _by_place(self, chosen: Tensor) -> GroupedRows:
        """Return the rows of tokens that chose these experts by the places that compute them, and record the choice."""
        grouped = GroupedRows.sort(chosen)
        if grouped.experts:
            self._routes.record(chosen, grouped)
        return grouped if self._placement is None else self._placement.spread(grouped)

    def _routed_elsewhere(self, x: Tensor, weights: Tensor, chosen: Tensor, adapted: "AdaptedElsewhere") -> Tensor:
        """Do what :meth:`_routed` does where rows go to other engines, and adapters may change experts in some of
        them."""
        assert self._exchange is not None
        slots = adapted.slots_of(len(x))
        changed = torch.from_numpy(slots >= 0)
        plain, other = self._by_place(chosen[~changed]), self._by_place(chosen[changed])
        if self._routes.chosen is not None:
            self._routes.chosen = chosen
        # Each rank makes both trips in every layer: another one may have rows with adapters where this one has none.
        trips = self._exchange.trips([plain, other], self._num_places, adapted.widest * x.element_size())
        out, per_token = torch.empty_like(x), weights.shape[1]
        rows = x[~changed]
        computed = trips[0].carry(rows[plain.order // per_token], self._compute)
        out[~changed] = mix_rows(rows, plain, weights[~changed], computed)
        rows, tokens = x[changed], other.order // per_token
        slots = slots[slots >= 0][tokens.numpy()]
        computed = adapted.compute(trips[1], rows[tokens], other, slots, self._experts, self._expert_at)
        out[changed] = mix_rows(rows, other, weights[changed], computed)
        return out

    def _adapted_expert(self, place: int, adapters: ExpertAdapters) -> MLP:
        # Wrapped when it is needed, so that experts which no adapter changes cost nothing more.
        if place not in self._adapted:
            expert, number = self._experts[place], self._expert_at(place)
            self._adapted[place] = expert.with_layers(*adapters.wrap(f"{self._prefix}.{number}", expert.layers))
        return self._adapted[place]

    def _compute(self, place: int, rows: Tensor) -> Tensor:
        return self._experts[place](rows)

    def held(self) -> dict[int, MLP]:
        """Return the experts that are on this rank, by their numbers in the model."""
        return {self._expert_at(place): expert for place, expert in self._experts.items()}

    def lacks(self, held: Mapping[int, MLP]) -> bool:
        """Return whether :meth:`relocate` would have to load experts beside those that are ``held``."""
        self._place()
        places = range(self._switches.count) if self._own is None else self._own
        wanted = [self._expert_at(place) for place in places]
        return len(wanted) > len({*wanted} & held.keys())

    def relocate(self, checkpoint: Checkpoint | None, held: Mapping[int, MLP]) -> None:
        """Fill the places that this rank has now with experts that are ``held``, by their numbers, and others of the
        checkpoint; None: it lacks none. Raises ``ValueError`` as :meth:`Checkpoint.take`."""
        self._place()
        left, experts = dict(held), dict[int, MLP]()
        for place in range(self._switches.count) if self._own is None else self._own:
            number = self._expert_at(place)
            # Not for two places: each place takes over another expert by itself.
            if (expert := left.pop(number, None)) is None:
                assert checkpoint is not None, "the experts that it lacks are to be loaded"
                assert self._load is not None, "all experts are computed at once, and none moves"
                expert = self._load(checkpoint, number)
            experts[place] = expert
        self._experts, self._prepared, self._adapted = experts, {}, {}

    def _place(self) -> None:
        """Take the places that exchange and balancer have now; without an exchange they are those of the start."""
        if self._balancer is not None:
            self._placement = self._balancer.layer(self._routes.number, self._switches.count)
            self._num_places = len(self._placement.logical)
        if self._exchange is not None:
            self._own = self._exchange.own(self._num_places)

    def _expert_at(self, place: int) -> int:
        return place if self._placement is None else int(self._placement.logical[place])

    def packed_bytes(self) -> int:
        """Return the most bytes that :meth:`pack` makes of one of this rank's experts."""
        experts = list(self._experts.values())
        if isinstance(experts[0].layers[0], Unpackable):
            experts = experts[:1]  # matrices of floats have one size; integers have the bits that their values take
        return max(packed_bytes(expert.states()) for expert in experts)

    def pack(self, place: int) -> Tensor:
        """Return the weights of the expert at one of this rank's places as bytes of the host, uint8 [n]."""
        return pack_states(self._experts[place].states())

    def prepare(self, place: int, data: Tensor) -> None:
        """Make another expert for a place, beside the one that it has, of the bytes that :meth:`pack` made and zeros
        that may follow. Raises ``ValueError`` for bytes of other experts."""
        self._prepared[place] = self._experts[place].with_states(unpack_states(data))

    def switch(self) -> int:
        """Use all prepared experts from the next step on. Returns how many they are."""
        prepared, self._prepared, self._adapted = self._prepared, {}, {}
        for place, expert in prepared.items():
            self._experts[place].take(expert)
        return len(prepared)

    def forget_prepared(self) -> None:
        """Drop the prepared experts."""
        self._prepared = {}

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32, and the numbers of each token's experts, both [T, per_token]."""
        logits = self._router(x, torch.float32)
        if self._switches.router is not None:
            router, sigmoid = self._switches.router, self._sigmoid
            return choose_in_groups(logits, self._score_bias, self._switches, router, sigmoid)
        if self._switches.scales_inputs:
            best, chosen = logits.topk(self._switches.per_token, dim=-1)
            return self._sigmoid(best), chosen
        if self._choose is not None:
            return self._choose(logits, self._switches.per_token, normalizes=self._switches.normalizes_weights)
        shares = logits.softmax(-1)
        weights, chosen = shares.topk(self._switches.per_token, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self._switches.normalizes_weights else weights, chosen


class AdaptedElsewhere:
    """Computes rows whose adapters change experts that may be on any engine: the products with an expert's own weights
    where it is, those with an adapter's matrices here.

    So an engine needs no adapter of another one's requests: each has others in its slots, or has not loaded them.
    """

    def __init__(self, prefix: str, adapters: ExpertAdapters, sizes: tuple[int, int], like: MLP) -> None:
        """``prefix``: of the layer's experts. ``sizes``: of the model's states, and within an expert. ``like``: any of
        them, which all have one shape."""
        self._prefix, self._adapters = prefix, adapters
        # Without its weights: this rank may have no expert any more when the group has grown.
        self._like = GivenMLP(like, list).mlp
        self._hidden, self._inner = sizes
        self._wrapped: dict[int, GivenMLP] = {}
        """By the number of the expert in the model, as far as they were needed."""

    @property
    def widest(self) -> int:
        """Return how many numbers the widest row has that a trip carries: gates and ups, or states."""
        return max(self._hidden, 2 * self._inner)

    def slots_of(self, num_rows: int) -> npt.NDArray[np.int32]:
        """Return [num_rows] the slot of each token's adapter; -1: it has none that changes experts of this layer."""
        found = self._adapters.slots_of(self._prefix)
        return np.full(num_rows, -1, np.int32) if found is None else found

    def compute(
        self,
        trip: "RowTrip",
        rows: Tensor,
        grouped: GroupedRows,
        slots: npt.NDArray[np.int32],
        experts: Mapping[int, MLP],
        number_at: Callable[[int], int],
    ) -> Tensor:
        """Return what the experts compute of ``rows`` [n, hidden_size], which are sorted by place as ``grouped`` says
        and have adapters in ``slots`` [n]. ``experts``: of this rank, by place. ``number_at`` returns the expert's
        number in the model."""
        parts = [(self._mlp(number_at(place)), part) for place, part in _slices(grouped) if trip.reaches(place)]
        outputs = trip.carry(rows, lambda place, x: experts[place].layers[0](x), 2 * self._inner)
        inner = rows.new_zeros(len(rows), self._inner)
        try:
            for mlp, part in parts:
                self._adapters.take(slots[part])
                inner[part] = mlp.inner(rows[part], outputs[part])
            results = trip.carry(inner, lambda place, x: experts[place].layers[1](x), self._hidden)
            for mlp, part in parts:
                self._adapters.take(slots[part])
                results[part] = mlp.down(inner[part], results[part])
        finally:
            self._adapters.take(None)
        return results

    def _mlp(self, number: int) -> GivenMLP:
        if number not in self._wrapped:
            self._wrapped[number] = GivenMLP(self._like, partial(self._adapters.wrap, f"{self._prefix}.{number}"))
        return self._wrapped[number]


def _slices(grouped: GroupedRows) -> Iterator[tuple[int, slice]]:
    """Yield each place with its rows among those that are sorted by place."""
    first = 0
    for place, count in zip(grouped.experts, grouped.counts, strict=True):
        yield place, slice(first, first + count)
        first += count


def choose_in_groups(
    logits: Tensor,
    bias: Tensor | None,
    experts: ExpertSwitches,
    router: RouterSwitches,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Return the weights and the numbers of each token's experts, both [T, per_token], from logits [T, count].

    ``bias`` [count] is added to the scores for the choice alone (DeepSeek-V3); None: there is none (V2).
    """
    scores = logits.softmax(-1) if bias is None else sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    if router.num_groups > 1:
        grouped = ranked.view(len(ranked), router.num_groups, -1)
        best = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        chosen_groups = best.topk(router.groups_per_token, dim=-1).indices
        is_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, chosen_groups, False)
        ranked = grouped.masked_fill(is_out[..., None], -torch.inf).flatten(-2)
    chosen = ranked.topk(experts.per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.normalizes_weights:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.scale, chosen


def _load_shared(
    checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, experts: ExpertSwitches
) -> "_Shared | MLP":
    if experts.router is None and not experts.scales_inputs and config.family != "granitemoehybrid":
        return _Shared(checkpoint, prefix, config, ops, experts.shared_size)
    name = "shared_expert" if experts.scales_inputs else "shared_experts"
    return MLP(checkpoint, f"{prefix}.{name}", config, ops, experts.shared_size, sums=False)


class _Shared:
    """Computes the expert of every token, times a gate."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops, size: int) -> None:
        self._mlp = MLP(checkpoint, f"{prefix}.shared_expert", config, ops, size, sums=False)
        self._gate = load_linear(checkpoint, [f"{prefix}.shared_expert_gate"], config.hidden_size, [1], bias=False)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.gate_by_sigmoid(self._mlp(x), self._gate(x))
