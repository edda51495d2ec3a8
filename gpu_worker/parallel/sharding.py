"""Decides which part of a model's tensors a rank holds, as Megatron-LM does (Shoeybi et al., 2019).

Queries, keys, values and the inner side of an MLP are cut by output, and the products that follow them by input, so a
layer takes two sums over the ranks. Embeddings and the output layer are cut by vocabulary, so that every rank has an
equal part of all weights: the embeddings of a step are summed over the ranks, and its logits gathered on the rank that
draws. It does not import torch: configurations hold these places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tokenloom.engine_core.data.config import EplbConfig, ParallelConfig


@dataclass(frozen=True, slots=True)
class ShardedDimension:
    """Holds which entries a rank has along one dimension of a tensor."""

    total: int
    """Entries of the whole tensor."""
    ranges: tuple[tuple[int, int], ...]
    """(first, end) of each run of entries, in the order in which the rank holds them."""


Dimension: TypeAlias = int | ShardedDimension
"""The length of a dimension that every rank holds whole, or the part of one that is cut."""


def length(dimension: Dimension) -> int:
    """Return how many entries this rank holds."""
    return dimension if isinstance(dimension, int) else sum(end - first for first, end in dimension.ranges)


def total(dimension: Dimension) -> int:
    """Return how many entries the checkpoint holds."""
    return dimension if isinstance(dimension, int) else dimension.total


def joined(dimensions: Sequence[Dimension]) -> Dimension:
    """Return the dimension in which these follow one another."""
    if all(isinstance(each, int) for each in dimensions):
        return sum(map(length, dimensions))
    ranges: list[tuple[int, int]] = []
    start = 0
    for each in dimensions:
        parts = ((0, each),) if isinstance(each, int) else each.ranges
        ranges += [(start + first, start + end) for first, end in parts]
        start += total(each)
    return ShardedDimension(start, tuple(ranges))


@dataclass(frozen=True, slots=True)
class Shard:
    """Holds the place of a rank among those that compute every layer together."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 0
    """KV heads of the whole model; not read if there is one rank."""
    spreads_context: bool = False
    """Whether each rank keeps all KV heads of some tokens, and not some heads of all tokens."""
    cuts_vocabulary: bool = True
    """Whether each rank has some tokens of embeddings and output layer. Otherwise embeddings are whole on every rank,
    and the output layer on the one that draws."""

    @property
    def context_size(self) -> int:
        """Return over how many ranks the tokens of a sequence are spread."""
        return self.size if self.spreads_context else 1

    def part(self, count: int) -> Dimension:
        """Return this rank's part of a dimension of which each rank has ``count`` entries."""
        if self.size == 1:
            return count
        return ShardedDimension(count * self.size, ((self.rank * count, (self.rank + 1) * count),))

    def vocabulary(self, num_tokens: int) -> Dimension:
        """Return which of ``num_tokens`` this rank has: an even part, or one more, of any number of tokens."""
        if self.size == 1 or not self.cuts_vocabulary:
            return num_tokens
        first, end = (num_tokens * rank // self.size for rank in (self.rank, self.rank + 1))
        return ShardedDimension(num_tokens, ((first, end),))

    def kv_part(self, num_heads: int, head_size: int) -> Dimension:
        """Return this rank's part of keys or values, of which each rank has ``num_heads``: the heads that its queries
        read, which several ranks hold if there are fewer KV heads than ranks."""
        return self.shared_part(self.num_kv_heads, num_heads, head_size)

    def shared_part(self, total_heads: int, num_heads: int, head_size: int) -> Dimension:
        """Return this rank's ``num_heads`` of ``total_heads``, which serve heads that are divided evenly: several ranks
        hold the same if there are fewer than ranks. ``total_heads`` is not read if there is one rank."""
        if self.size == 1:
            return num_heads * head_size
        first = self.rank * total_heads // self.size
        return ShardedDimension(total_heads * head_size, ((first * head_size, (first + num_heads) * head_size),))


WHOLE: Final = Shard()


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Holds the place of a rank in an engine: which part of which layers it computes."""

    tensor_rank: int = 0
    tensor_size: int = 1
    stage: int = 0
    num_stages: int = 1
    spreads_context: bool = False
    """As in :class:`Shard`."""
    spreads_experts: bool = False
    """Whether each rank holds whole experts, and not a part of every expert."""
    data_rank: int = 0
    """The number of the engine in its data-parallel group, over which the experts are spread."""
    data_size: int = 1
    """Engines of that group; 1: the experts are not spread over engines."""
    prefill_rank: int = 0
    """The number of the rank among those that have the same part of a copy of the model, and divide long prompts."""
    prefill_size: int = 1
    """Copies of the model."""
    num_redundant_experts: int | None = None
    """Copies of experts beside one of each, which are moved by their load; None: experts stay where they are."""
    cuts_vocabulary: bool = True
    """As in :class:`Shard`."""

    @property
    def is_alone(self) -> bool:
        """Return whether this rank is the only one of its engine."""
        return self.tensor_size == self.num_stages == self.prefill_size == 1

    @property
    def has_whole_model(self) -> bool:
        """Return whether this rank has all layers, and all of each."""
        return self.tensor_size == self.num_stages == self.data_size == 1

    @property
    def is_whole(self) -> bool:
        """Return whether this rank computes the whole model."""
        return self.is_alone and self.data_size == 1

    @property
    # One rank draws: all could compute the same tokens only if their processors rounded alike.
    def output_rank(self) -> int:
        """Return the rank in the engine that has all logits and draws tokens: the first one of the last stage."""
        return self.tensor_size * (self.num_stages - 1)

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank in the engine that has this one's part of the layers of another stage, in its copy of the
        model."""
        return self.tensor_size * (self.num_stages * self.prefill_rank + stage) + self.tensor_rank

    @property
    def samples(self) -> bool:
        """Return whether this rank is the output rank."""
        return self.tensor_rank == self.prefill_rank == 0 and self.stage == self.num_stages - 1

    @property
    def shares_table(self) -> bool:
        """Return whether one block table must serve layers or tokens that this rank does not have."""
        return self.num_stages > 1 or self.spreads_context

    @property
    def numerics(self) -> str | None:
        """Return what sets results apart from those of one rank: the order in which sums are added; None: nothing."""
        if self.data_size > 1:
            # The number of engines is left out: whichever of them compute the experts of a token, its own worker adds
            # their rows in one order.
            return "ep" if self.tensor_size == 1 else f"ep-tp-{self.tensor_size}"
        moves = "" if self.num_redundant_experts is None else "-eplb"
        return None if self.tensor_size == 1 else f"tp-{self.tensor_size}{moves}"

    @property
    def num_expert_ranks(self) -> int:
        """Return over how many ranks whole experts are spread."""
        return self.data_size * (self.tensor_size if self.spreads_experts else 1)

    def experts(self, count: int) -> range | None:
        """Return which of ``count`` places of experts this rank holds; None: it holds a part of each expert."""
        if self.num_expert_ranks == 1:
            return None
        part, parts = self.data_rank, self.num_expert_ranks
        if self.spreads_experts:
            part = part * self.tensor_size + self.tensor_rank
        return range(count * part // parts, count * (part + 1) // parts)

    def layers(self, num_layers: int) -> range:
        """Return the layers of this rank's stage; earlier stages have one more if they are not equally many."""
        each, more = divmod(num_layers, self.num_stages)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))


ONLY_PLACE: Final = RankPlace()


def place_of(parallel: ParallelConfig) -> RankPlace:
    """Return the place of the rank that ``parallel`` is for."""
    prefill_rank, rank = divmod(parallel.rank, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    stage, tensor_rank = divmod(rank, parallel.tensor_parallel_size)
    balancing = parallel.eplb_config or EplbConfig()
    return RankPlace(
        tensor_rank,
        parallel.tensor_parallel_size,
        stage,
        parallel.pipeline_parallel_size,
        spreads_context=parallel.decode_context_parallel_size > 1,
        spreads_experts=parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1,
        data_rank=parallel.data_parallel_rank if parallel.spreads_experts_over_engines else 0,
        data_size=parallel.data_parallel_size if parallel.spreads_experts_over_engines else 1,
        prefill_rank=prefill_rank,
        prefill_size=parallel.prefill_context_parallel_size,
        num_redundant_experts=balancing.num_redundant_experts if parallel.enable_eplb else None,
    )
