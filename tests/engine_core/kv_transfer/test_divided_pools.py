"""Tests that blocks of a pool that is divided in another way arrive number by number."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_core.kv_transfer.kv_pair import MemoryReader, MemoryTransport
from tokenloom.engine_core.data.kv_groups import part_suffix, read_parts
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.kv_transfer import kv_copier
from tokenloom.engine_core.kv_transfer.kv_copier import DividedPool
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool, KVRegion, KVTransferError

LAYERS, HEADS, TOKENS, SIZE, NUM_BLOCKS = 3, 2, 8, 4, 7
WHOLE = (LAYERS, HEADS, TOKENS)
DTYPES = {"fp32": SIZE * 4, "int8+fp32": SIZE + 4}
"""Bytes of a row."""


def layout(kind: str, dtype: str) -> str:
    def part(counts: tuple[int, int, int], first: tuple[int, int, int]) -> str:
        layers, heads, tokens = counts
        name = f"HND/{dtype}/{layers}x{heads}x{SIZE}/{tokens}"
        return name if counts == WHOLE else name + part_suffix(first, WHOLE)

    half = TOKENS // 2
    return "+".join(
        {
            "whole": [part(WHOLE, (0, 0, 0))],
            "heads": [part((LAYERS, 1, TOKENS), (0, head, 0)) for head in range(2)],
            "shared heads": [part((LAYERS, 1, TOKENS), (0, head, 0)) for head in (0, 0, 1, 1)],
            "tokens": [part((LAYERS, HEADS, half), (0, 0, first)) for first in (0, half)],
            "single tokens": [part((LAYERS, HEADS, 1), (0, 0, first)) for first in range(TOKENS)],
            "layers": [part((2, HEADS, TOKENS), (0, 0, 0)), part((1, HEADS, TOKENS), (2, 0, 0))],
        }[kind]
    )


KINDS = ("whole", "heads", "shared heads", "tokens", "single tokens", "layers")


def make_pool(name: str, dtype: str) -> KVPool:
    """A pool whose parts lie as those of ranks do, each from a page on."""
    regions, begin = [], 0
    for part in read_parts(name):
        size = len(part.box[1]) * len(part.box[2]) * DTYPES[dtype]
        for number in range(2 * len(part.box[0])):
            regions.append(KVRegion(begin + number * size * NUM_BLOCKS, size))
        begin = -(-(begin + 2 * len(part.box[0]) * size * NUM_BLOCKS) // 4096) * 4096
    return KVPool(PoolMemory.allocate(begin, shared=False), tuple(regions), NUM_BLOCKS, name)


def numbers(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """What each row is filled with: [planes, layers, blocks, heads, tokens, bytes], numbers and scales."""
    generator = np.random.default_rng(3)
    shape = (2, LAYERS, NUM_BLOCKS, HEADS, TOKENS)
    scale = 4 if dtype == "int8+fp32" else 0
    rows = generator.integers(1, 256, (*shape, DTYPES[dtype]), dtype=np.uint8)
    return rows[..., : DTYPES[dtype] - scale], rows[..., DTYPES[dtype] - scale :]


def content(name: str, dtype: str, block_id: int) -> list[bytes]:
    """The bytes that a block has, region by region, written down one by one."""
    found, (rows, scales) = [], numbers(dtype)
    for part in read_parts(name):
        layers, heads, tokens = part.box
        for layer, plane in itertools.product(layers, range(2)):
            pieces = b""
            for head in heads:
                for values in (rows, scales):
                    pieces += b"".join(values[plane, layer, block_id, head, token].tobytes() for token in tokens)
            found.append(pieces)
    return found


def fill(pool: KVPool, dtype: str) -> None:
    for block_id in range(NUM_BLOCKS):
        for row, piece in zip(pool.rows(block_id), content(pool.layout, dtype, block_id), strict=True):
            row[:] = np.frombuffer(piece, np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("theirs", "ours"), list(itertools.product(KINDS, KINDS)))
def test_every_row_arrives_where_its_rank_keeps_it(
    theirs: str, ours: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_copier, "_STAGED_BYTES", 2 * sum(DTYPES.values()) * LAYERS * HEADS * TOKENS)
    owner, pool = make_pool(layout(theirs, dtype), dtype), make_pool(layout(ours, dtype), dtype)
    fill(owner, dtype)
    divided, transport = DividedPool(pool, owner.layout), MemoryTransport({})
    source, target = [5, 0, 1, 6, 2], [1, 3, 4, 0, 6]
    divided.read(MemoryReader(transport, owner), source, target)
    assert transport.num_blocks == 5
    assert transport.num_reads > 1, "blocks come in several batches"
    for there, here in zip(source, target, strict=True):
        assert [row.tobytes() for row in pool.rows(here)] == content(pool.layout, dtype, there)
    for untouched in (2, 5):
        assert not any(row.any() for row in pool.rows(untouched))
    assert divided.checksums(target) == owner.checksums(source)
    pool.damage(6)
    sums = divided.checksums(target)
    assert (sums[:4], sums[4] != owner.checksums([2])[0]) == (owner.checksums(source[:4]), True)


def test_layouts_that_have_nothing_in_common_are_refused() -> None:
    pool = make_pool(layout("whole", "fp32"), "fp32")
    for other in (layout("heads", "int8+fp32"), "HND/fp32/3x2x8/8", "latent/fp32/2x64+8/16", ""):
        with pytest.raises(KVTransferError, match="this engine's HND/fp32/3x2x4/8") as caught:
            DividedPool(pool, other)
        assert caught.value.reason == "layout"


def test_a_pool_whose_regions_are_others_than_its_layout_says_is_refused() -> None:
    pool, name = make_pool(layout("heads", "fp32"), "fp32"), layout("whole", "fp32")
    owner = make_pool(name, "fp32")
    for regions in (pool.regions[:-1], (*pool.regions[:1], *pool.regions[:-1])):
        divided = DividedPool(replace(pool, regions=regions), name)
        with pytest.raises(KVTransferError, match="regions"):
            divided.read(MemoryReader(MemoryTransport({}), owner), [0], [0])


def test_a_block_that_is_not_there_is_refused() -> None:
    pool, owner = (make_pool(layout(kind, "fp32"), "fp32") for kind in ("tokens", "whole"))
    with pytest.raises(KVTransferError, match="exceed a pool of 7 blocks"):
        DividedPool(pool, owner.layout).read(MemoryReader(MemoryTransport({}), owner), [0], [NUM_BLOCKS])
