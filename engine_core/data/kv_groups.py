"""Partitions the layers of a model into groups whose KV blocks are kept for equally long.

A layer that attends to a window needs the blocks of that window only; a layer of full attention needs all of them. The
groups share one pool: a block holds the KV of one group for ``block_size`` tokens, and tensor i of the pool serves the
i-th layer of every group, so that every block has the same size.

It also names which part of a model's KV each rank of an engine keeps, and what pools have in common that are divided in
other ways. A block of a plain model holds numbers by layer, KV head and token. Tensor parallel ranks have heads of it,
pipeline stages layers, and context parallel ranks tokens; a rank's part is a box of these. The name of a part ends with
its place and the size of the whole: ``HND/fp32/4x1x64/16@0.1.0:4x2x16`` is the second of two KV heads.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from .config import EngineConfig

# As in vLLM. Tables in messages and kernels need an entry for what is not kept; nothing reads it, and if anything did,
# it would find finite numbers, because no step writes there.
NULL_BLOCK = 0
"""The block that stands in a table of a grouped pool for content that is not kept. No request ever writes to it."""
# Five windows of 1,024 to one full layer, as in Gemma 3, already need only 27 % of one table's KV at 8,192 tokens
# (tests/engine_core/kv_cache/test_grouped_kv_cache_manager.py).
MAX_GROUPS = 8
"""More groups would waste less memory on unequal numbers of layers, but each step plans attention for each group."""
# In Gemma 3 five of six layers see 512 or 1,024 tokens: one block table for all kept six times the KV that attention
# reads.
_FULL_WEIGHT = 8
"""How many layers with a window need as much memory as one with full attention, in a context that is worth groups."""
_GROUP_WORTH = 20
"""Each group needs a plan of attention in each step: a group less is worth one part of so many more of memory."""


class KVGroup(msgspec.Struct, frozen=True):
    """Holds the layers whose KV lies in the same blocks."""

    window: int | None
    """How many positions a token of these layers sees, itself included; None: all."""
    layers: list[int]
    """Their indices in the model; the i-th one uses tensor i of the pool."""


class KVCacheConfig(msgspec.Struct, frozen=True):
    """Holds the size of the paged KV cache, which is fixed at start-up."""

    num_blocks: int
    max_model_len: int
    """The limit for prompt and output together, in tokens, after it was fitted to the blocks."""
    groups: list[KVGroup] = []
    """The groups of layers, each with a table of its own; empty: all layers share one."""
    has_null_block: bool = False
    """Whether block ``NULL_BLOCK`` is kept free of requests although there are no groups: dummy batches write to it."""
    num_state_slots: int = 0
    """Slots for the states of layers that keep one; 0: none does."""
    state_chunk: int = 1
    """As in ``ModelInfo.state_chunk``."""
    cross_blocks: int = 0
    """Blocks of a request for the keys and values of the rows that stand beside its prompt; 0: none does."""
    keeps_every_state: bool = False
    """Whether states are so small that one is kept at the end of each block, and not only at the ends of prompts."""


def model_groups(
    windows: Sequence[int | None], max_model_len: int, config: EngineConfig, sources: Sequence[int] = ()
) -> list[KVGroup]:
    """Return the groups of a model whose layers have these windows; an empty list if they share one block table.

    ``sources``: for each layer the one whose keys and values it attends to; empty: its own. Only such layers have KV.
    """
    groups = partition_layers(windows, max_model_len, sorted(set(sources)) or None)
    return [] if config.cache.disable_hybrid_kv_cache_manager else groups


def partition_layers(
    windows: Sequence[int | None], max_model_len: int, members: Sequence[int] | None = None
) -> list[KVGroup]:
    """Return the groups of a model whose layers have these windows, those of full attention first.

    A window that reaches over ``max_model_len`` counts as full attention. Returns an empty list if all layers are of
    one kind: such a model needs no groups. ``members``: the layers to partition; None: all.
    """
    members = range(len(windows)) if members is None else members
    kinds = [window if window is not None and window < max_model_len else None for window in windows]
    counts = Counter(kinds[layer] for layer in members)
    if not 1 < len(counts) <= MAX_GROUPS:
        return []
    size = _group_size(counts)
    groups = []
    # Full attention comes first because KV events and placement by prefix follow group 0, which keeps every block that
    # a hit needs.
    for window in sorted(counts, key=lambda window: (window is not None, -(window or 0))):
        layers = [layer for layer in members if kinds[layer] == window]
        groups += [KVGroup(window, layers[first : first + size]) for first in range(0, len(layers), size)]
    return groups


def _group_size(counts: Counter[int | None]) -> int:
    """Return how many layers a group has, so that a long context needs little memory in few groups."""

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def cost(size: int) -> int:
        # A group that is not full wastes its missing layers: those of full attention waste a whole context, those of a
        # window only the window.
        weights = {window: _FULL_WEIGHT if window is None else 1 for window in counts}
        memory = sum(-(-count // size) * size * weights[window] for window, count in counts.items())
        return memory * (_GROUP_WORTH + groups(size))

    return min((size for size in range(1, max(counts.values()) + 1) if groups(size) <= MAX_GROUPS), key=cost)


def layers_per_group(groups: Sequence[KVGroup]) -> int:
    """Return how many tensors the pool of these groups has."""
    return max(len(group.layers) for group in groups)


def describe_groups(groups: Sequence[KVGroup]) -> str:
    """Return a text that two pools have in common if their blocks mean the same: ``full,512,512``."""
    return ",".join("full" if group.window is None else str(group.window) for group in groups)


def first_seen_block(window: int | None, position: int, block_size: int) -> int:
    """Return the index of the first block that a token at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


class KVNeed:
    """Computes how many blocks a request of a grouped model needs at most, while it is computed."""

    def __init__(self, groups: Sequence[KVGroup], block_size: int, max_chunk: int, *, lends: bool) -> None:
        """``max_chunk``: most tokens of a request in one step. ``lends``: whether other engines read from this one,
        which must know the last blocks of a prompt before they are computed."""
        self._num_full = sum(group.window is None for group in groups)
        windows = [group.window for group in groups if group.window is not None]
        self.peaks = [-(-(window - 1 + max_chunk) // block_size) + 1 for window in windows]
        """For each group with a window: blocks of the window and of a chunk after it."""
        self.lent = [-(-window // block_size) + 1 for window in windows]
        """For each group with a window: blocks that a reader needs."""
        self._lends = lends

    def of_blocks(self, count: int) -> int:
        """Return the need of a request of so many blocks of tokens."""
        lent = self.lent if self._lends else [0] * len(self.peaks)
        return self._num_full * count + sum(
            min(count, peak + more) for peak, more in zip(self.peaks, lent, strict=True)
        )

    def capacity(self, num_blocks: int) -> int:
        """Return how many blocks of tokens a request may have in an empty pool of ``num_blocks``; at most as many as
        the pool has."""
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of_blocks(middle) <= num_blocks else (low, middle - 1)
        return low


Box = tuple[range, range, range]
"""Layers, KV heads, and tokens of a block."""

_SCALED = "int8+fp32"
"""The dtype whose rows have scales."""
_COUNT = r"(\d{1,6})"
_SHAPE = f"{_COUNT}x{_COUNT}x{_COUNT}"
_PART = re.compile(
    rf"HND/(int8\+fp32|[a-z0-9-]+)/{_SHAPE}/{_COUNT}(?:@{_COUNT}\.{_COUNT}\.{_COUNT}:{_SHAPE})?", re.ASCII
)
_MOST_CHARS = 1 << 13
"""Names come from other engines."""


@dataclass(frozen=True, slots=True)
class KVPart:
    """Describes what a rank keeps of each block of a plain model."""

    dtype: str
    head_size: int
    """Elements of a row: one token's keys, or values, in one head."""
    box: Box
    whole: tuple[int, int, int]
    """Layers, KV heads and tokens of a block of the whole model."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of each row; the scales of a head lie behind all of its numbers."""
        return 4 if self.dtype == _SCALED else 0

    @property
    def layout(self) -> str:
        """Name what pools of equal content have in common, however they are divided."""
        layers, heads, tokens = self.whole
        return f"HND/{self.dtype}/{layers}x{heads}x{self.head_size}/{tokens}"


def part_suffix(first: Sequence[int], whole: Sequence[int]) -> str:
    """Return what follows the name of a rank's cache: the first layer, KV head and token of a block that it keeps, and
    the size of the ``whole``."""
    return f"@{'.'.join(map(str, first))}:{'x'.join(map(str, whole))}"


def read_parts(layout: str) -> list[KVPart]:
    """Return the parts of a pool of this layout, in order of its regions; an empty list if the layout is not that of a
    plain model, whose parts could be joined."""
    parts: list[KVPart] = []
    position = 0
    while len(layout) <= _MOST_CHARS and (match := _PART.match(layout, position)) is not None:
        dtype, *texts = match.groups()
        layers, heads, size, tokens, *place = (int(text or 0) for text in texts)
        is_named = texts[-1] is not None
        first_layer, first_head, first_token = place[:3]
        box = (
            range(first_layer, first_layer + layers),
            range(first_head, first_head + heads),
            range(first_token, first_token + tokens),
        )
        whole = (place[3], place[4], place[5]) if is_named else (layers, heads, tokens)
        parts.append(KVPart(dtype, size, box, whole))
        position = match.end() + 1
        if position > len(layout):
            return parts if _are_joined(parts) else []
        # What drafts has a part too, behind the model's, and names no place in it.
        if layout[position - 1] != "+" or not is_named:
            return []
    return []


def common_layout(layout: str) -> str:
    """Return what pools have in common that can exchange blocks: the layout itself, unless it is that of a plain model
    whose parts are divided among ranks."""
    parts = read_parts(layout)
    return parts[0].layout if parts else layout


def distinct(parts: Iterable[KVPart]) -> dict[tuple[tuple[int, int], ...], int]:
    """Return the number of one part for each box that parts have: ranks that share a KV head keep equal ones."""
    return {tuple((each.start, each.stop) for each in part.box): number for number, part in enumerate(parts)}


def _are_joined(parts: Sequence[KVPart]) -> bool:
    """Return whether the parts are those of one model, and all of it."""
    one = parts[0]
    if not all(one.whole):
        return False
    if any((part.dtype, part.head_size, part.whole) != (one.dtype, one.head_size, one.whole) for part in parts):
        return False
    if any(side.stop > total or not side for part in parts for side, total in zip(part.box, one.whole, strict=True)):
        return False
    boxes = [parts[number].box for number in distinct(parts).values()]
    if any(_overlap(box, other) for number, box in enumerate(boxes) for other in boxes[:number]):
        return False
    return sum(math.prod(map(len, box)) for box in boxes) == math.prod(one.whole)


def _overlap(box: Box, other: Box) -> bool:
    return all(shared(one, two) for one, two in zip(box, other, strict=True))


def shared(one: range, other: range) -> range:
    """Return what two ranges of step 1 have in common."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))
