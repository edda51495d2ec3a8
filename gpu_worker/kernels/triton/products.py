"""Multiplies rows by matrices, in float32.

The first product is of at most 16 rows: what a decode step of few requests does, limited by reading the weights. Each
program streams the weights of a few outputs through shared memory once, at 16 bytes a load. Up to 16 rows cost the
same, because a matrix instruction takes 16. It may normalize the rows that it reads, and add what it finds to the
residual stream: a layer of few rows is then six kernels, and what their begins and ends cost counts.

The second multiplies rows by the matrices of their experts: one launch for all experts, whatever the router chose. The
places of the rows are sorted by expert and padded so that each tile belongs to one expert (as in vLLM's fused experts).
Sizes depend on how many rows there are alone, so nothing waits for the router's choice on the host. A layer of experts
is ``route``, ``rank_rows``, ``place_rows``, two products and ``mix_places``.

The third multiplies rows by a matrix of 4-bit integers, or of 8-bit floats, in groups of inputs that share a scale.
"""

import triton
import triton.language as tl

from .rows import activate

MOST_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x,
    weight,
    scales,
    bias,
    norm,
    out,
    num_rows,
    inputs,
    outputs,
    eps,
    shift,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute COLUMNS outputs of all rows.

    Grid: (outputs / COLUMNS, rounded up). A row's result does not depend on the other rows.

    Args:
        x: [num_rows, inputs]; num_rows is at most 16.
        weight: [outputs, inputs]; with an activation [2 * outputs, inputs], all gates before the ups.
        scales: [rows of ``weight``] float32, factors on 8-bit floats, read if HAS_SCALES.
        bias: As many numbers as ``weight`` has rows, read if HAS_BIAS.
        norm: [inputs], read if HAS_NORM: what is multiplied is x / rms(x) * (norm + shift), with ``eps`` in the rms.
        out: [num_rows, outputs]: the product; with an activation activation(gates) * ups; if ADDS, what it holds is
            added to that.
        KIND: The activation, see ``activations.activate``; "none": there is none.
        EVEN: Whether COLUMNS divides ``outputs`` and DEPTH ``inputs``.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows, depth = tl.arange(0, 16), tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < outputs
    # With an activation the rows of the gates and then those of their ups, so that one product has both.
    WIDTH: tl.constexpr = COLUMNS if KIND == "none" else 2 * COLUMNS
    places = tl.arange(0, WIDTH)
    parts = tl.program_id(0) * COLUMNS + places % COLUMNS + places // COLUMNS * outputs
    is_part = tl.program_id(0) * COLUMNS + places % COLUMNS < outputs
    found = tl.zeros([16, WIDTH], tl.float32)
    squares = tl.zeros([16, DEPTH], tl.float32)
    at_x = rows[:, None] * inputs + depth[None, :]
    at_weight = parts.to(tl.int64)[:, None] * inputs + depth[None, :]
    for begin in tl.range(0, inputs, DEPTH):
        if EVEN:
            part = tl.load(x + at_x + begin, mask=is_row[:, None], other=0.0)
            if HAS_NORM:
                squares += part.to(tl.float32) * part.to(tl.float32)
                part = _weighted(part, tl.load(norm + begin + depth), shift)
            matrix = tl.load(weight + at_weight + begin, eviction_policy="evict_first").to(part.dtype)
        else:
            is_deep = (depth + begin < inputs)[None, :]
            part = tl.load(x + at_x + begin, mask=is_row[:, None] & is_deep, other=0.0)
            if HAS_NORM:
                squares += part.to(tl.float32) * part.to(tl.float32)
                part = _weighted(part, tl.load(norm + begin + depth, mask=depth + begin < inputs, other=0.0), shift)
            matrix = tl.load(weight + at_weight + begin, mask=is_part[:, None] & is_deep, other=0.0).to(part.dtype)
        found = tl.dot(part, tl.trans(matrix), found, input_precision="ieee")
    if HAS_NORM:
        # After the product: reading the rows for their norm first would hold up the weights.
        found *= tl.rsqrt(tl.sum(squares, 1) / inputs + eps)[:, None]
    if HAS_SCALES:
        found *= tl.load(scales + parts, mask=is_part, other=0.0)[None, :]
    if HAS_BIAS:
        found += tl.load(bias + parts, mask=is_part, other=0.0).to(tl.float32)[None, :]
    if KIND != "none":
        found, ups = tl.split(tl.permute(tl.reshape(found, (16, 2, COLUMNS)), (0, 2, 1)))
        # Rounded as the product, the activation and the product with the ups are when they are three operations.
        dtype = x.dtype.element_ty
        active = activate(found.to(dtype).to(tl.float32), KIND).to(dtype).to(tl.float32)
        found = active * ups.to(dtype).to(tl.float32)
    at = out + rows[:, None] * outputs + columns[None, :]
    is_result = is_row[:, None] & is_column[None, :]
    if ADDS:  # rounded before, as when adding is an operation of its own
        found = found.to(out.dtype.element_ty).to(tl.float32) + tl.load(at, mask=is_result, other=0.0).to(tl.float32)
    tl.store(at, found.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def _weighted(rows, weights, shift):
    """Return rows [n, m] times the weights [m] of a norm, in the dtype of the rows."""
    return (rows.to(tl.float32) * (weights.to(tl.float32) + shift)[None, :]).to(rows.dtype)


@triton.jit(do_not_specialize=["num_places"])
def grouped_product(
    x,
    weights,
    scales,
    factors,
    shifts,
    out,
    places,
    experts,
    num_places,
    inputs,
    outputs,
    SHARE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ADDS: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute COLUMNS outputs of ROWS rows of one expert.

    Grid: (tiles, outputs / COLUMNS, rounded up).

    Args:
        x: [num_places / SHARE, inputs]: place p reads row p / SHARE.
        weights: [experts, outputs, inputs]; with an activation [experts, 2 * outputs, inputs], all gates before ups.
        scales: [experts, rows of a matrix] float32, factors on 8-bit floats, read if HAS_SCALES.
        factors, shifts: [experts, outputs] float32, read if ADDS.
        out: [num_places, outputs]: the product; with an activation activation(gates) * ups; if ADDS, (what it holds +
            the product) * factors + shifts.
        places: [tiles * ROWS] int32: a place, or num_places where a tile is padded.
        experts: [tiles] int32: the expert of a tile, -1 for a tile without rows.
        KIND: As in :func:`few_rows`.
        EVEN: Whether DEPTH divides ``inputs`` and COLUMNS ``outputs``.
    """
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    if expert < 0:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_column = columns < outputs
    place = tl.load(places + tile * ROWS + tl.arange(0, ROWS))
    is_row = place < num_places
    at_x = (place // SHARE).to(tl.int64)[:, None] * inputs + depth[None, :]
    first = expert.to(tl.int64) * outputs * (1 if KIND == "none" else 2) + columns
    at_weight = first[:, None] * inputs + depth[None, :]
    at_up = (first + outputs)[:, None] * inputs + depth[None, :]
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, inputs, DEPTH):
        if EVEN:
            part = tl.load(x + at_x + begin, mask=is_row[:, None], other=0.0)
            matrix = tl.load(weights + at_weight + begin).to(part.dtype)
            if KIND != "none":
                other = tl.load(weights + at_up + begin).to(part.dtype)
                ups = tl.dot(part, tl.trans(other), ups, input_precision="ieee")
        else:
            is_deep = (depth + begin < inputs)[None, :]
            part = tl.load(x + at_x + begin, mask=is_row[:, None] & is_deep, other=0.0)
            matrix = tl.load(weights + at_weight + begin, mask=is_column[:, None] & is_deep, other=0.0).to(part.dtype)
            if KIND != "none":
                other = tl.load(weights + at_up + begin, mask=is_column[:, None] & is_deep, other=0.0).to(part.dtype)
                ups = tl.dot(part, tl.trans(other), ups, input_precision="ieee")
        found = tl.dot(part, tl.trans(matrix), found, input_precision="ieee")
    if HAS_SCALES:
        found *= tl.load(scales + first, mask=is_column, other=0.0)[None, :]
        if KIND != "none":
            ups *= tl.load(scales + first + outputs, mask=is_column, other=0.0)[None, :]
    if KIND != "none":
        dtype = x.dtype.element_ty
        active = activate(found.to(dtype).to(tl.float32), KIND).to(dtype).to(tl.float32)
        found = active * ups.to(dtype).to(tl.float32)
    at = out + place.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_result = is_row[:, None] & is_column[None, :]
    if ADDS:  # rounded where PyTorch's operations are
        dtype = out.dtype.element_ty
        held = tl.load(at, mask=is_result, other=0.0).to(tl.float32)
        found = (held + found.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        found *= tl.load(factors + first, mask=is_column, other=1.0)[None, :]
        found += tl.load(shifts + first, mask=is_column, other=0.0)[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def route(
    logits,
    weights,
    chosen,
    num_experts,
    per_token,
    NORMALIZES: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Choose the experts of one token: those with the largest shares of a softmax. Grid: (T,).

    Args:
        logits: [T, num_experts] float32, of the router.
        weights: [T, per_token] float32: the shares, divided by their sum if NORMALIZES. Written, as ``chosen``.
        chosen: [T, per_token] int64, by falling shares; among equals the lower number comes first.
        EXPERTS, CHOICES: powers of two, at least ``num_experts`` and ``per_token``.
    """
    token = tl.program_id(0).to(tl.int64)
    numbers, places = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_expert = numbers < num_experts
    x = tl.load(logits + token * num_experts + numbers, mask=is_expert, other=float("-inf"))
    shares = tl.exp(x - tl.max(x, 0))
    shares = shares / tl.sum(shares, 0)
    # A NaN counts as the largest, as in PyTorch: whatever a row holds, what is chosen is the number of an expert.
    left = tl.where(is_expert, tl.where(shares == shares, shares, float("inf")), -1.0)
    kept = tl.zeros([CHOICES], tl.float32)
    found = tl.zeros([CHOICES], tl.int32)
    for place in tl.range(0, per_token):
        number = tl.min(tl.where(left == tl.max(left, 0), numbers, EXPERTS), 0)
        is_it = numbers == number
        kept = tl.where(places == place, tl.sum(tl.where(is_it, shares, 0.0), 0), kept)
        found = tl.where(places == place, number, found)
        left = tl.where(is_it, -2.0, left)
    if NORMALIZES:
        kept = kept / tl.sum(kept, 0)
    at = token * per_token + places
    tl.store(weights + at, kept, mask=places < per_token)
    tl.store(chosen + at, found.to(tl.int64), mask=places < per_token)


@triton.jit(do_not_specialize=["num_real", "num_places"])
def rank_rows(chosen, num_real, sizes, ranks, counts, num_places, per_token, num_experts, WIDTH: tl.constexpr):
    """Number the rows of each expert. Grid: (num_places / WIDTH, rounded up).

    Args:
        chosen: [num_places] int64: the expert of each place. A number that no expert has is none.
        num_real: [1] int32: the tokens behind so many are padding, whose places have no expert.
        sizes: [num_experts] int32, zeros: how many rows each has. Written, as is what follows.
        ranks: [num_places] int32: the number of a place among those of its expert, in any order; -1: it has none.
        counts: [num_experts] int64: the rows of each expert are added to it.
    """
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_place = at < num_places
    expert = tl.load(chosen + at, mask=is_place, other=-1)
    is_row = is_place & (at // per_token < tl.load(num_real)) & (expert >= 0) & (expert < num_experts)
    # What a row gets does not depend on its number, so the order in which programs come is no matter.
    rank = tl.atomic_add(sizes + expert, tl.full([WIDTH], 1, tl.int32), mask=is_row)
    tl.atomic_add(counts + expert, tl.full([WIDTH], 1, tl.int64), mask=is_row)
    tl.store(ranks + at, tl.where(is_row, rank, -1), mask=is_place)


@triton.jit(do_not_specialize=["num_places", "num_tiles"])
def place_rows(
    chosen,
    ranks,
    sizes,
    places,
    experts,
    num_places,
    num_tiles,
    num_experts,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Put rows into tiles of ROWS, each of one expert. Grid: (at least num_experts, and num_places / WIDTH, rounded
    up).

    A program writes the tiles of one expert, and what pads the last of them, and then the places of WIDTH rows.

    Args:
        chosen, ranks, sizes: as :func:`rank_rows` has them, and has written them.
        places: [num_tiles * ROWS] int32, see :func:`grouped_product`. Written, as ``experts`` [num_tiles] int32.
        EXPERTS: A power of two, at least ``num_experts``.
    """
    program = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    size = tl.load(sizes + numbers, mask=numbers < num_experts, other=0)
    tiles = (size + ROWS - 1) // ROWS
    own_size = tl.sum(tl.where(numbers == program, size, 0), 0)
    own_tiles = tl.sum(tl.where(numbers == program, tiles, 0), 0)
    own_first = tl.sum(tl.where(numbers < program, tiles, 0), 0)
    for tile in range(own_tiles):
        tl.store(experts + own_first + tile, program)
    lanes = tl.arange(0, ROWS)
    tl.store(
        places + own_first * ROWS + own_size + lanes,
        tl.zeros([ROWS], tl.int32) + num_places,
        mask=lanes < own_tiles * ROWS - own_size,
    )
    if program == 0:
        for begin in range(tl.sum(tiles, 0), num_tiles, EXPERTS):
            tl.store(experts + begin + numbers, tl.full([EXPERTS], -1, tl.int32), mask=begin + numbers < num_tiles)
    at = program * WIDTH + tl.arange(0, WIDTH)
    rank = tl.load(ranks + at, mask=at < num_places, other=-1)
    expert = tl.load(chosen + at, mask=at < num_places, other=0)
    first = tl.sum(tl.where(numbers[None, :] < expert[:, None], tiles[None, :], 0), 1)
    tl.store(places + first * ROWS + rank, at, mask=rank >= 0)


@triton.jit
def mix_places(results, weights, out, per_token, size, WIDTH: tl.constexpr):
    """Add up what the experts of one token found, WIDTH columns of it. Grid: (T, size / WIDTH, rounded up).

    results: [T * per_token, size]; weights: [T, per_token] float32; out: [T, size].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < size
    found = tl.zeros([WIDTH], tl.float32)
    for place in tl.range(0, per_token):
        row = token * per_token + place
        part = tl.load(results + row * size + columns, mask=is_column, other=0.0).to(tl.float32)
        found += part * tl.load(weights + row)
    tl.store(out + token * size + columns, found.to(out.dtype.element_ty), mask=is_column)


@triton.jit(do_not_specialize=["num_rows"])
def packed_product(
    x,
    weight,
    scales,
    offsets,
    bias,
    out,
    partial,
    arrived,
    num_rows,
    inputs,
    outputs,
    group,
    IS_PACKED: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute a part of the inputs' products for COLUMNS outputs of ROWS rows.

    Grid: (outputs / COLUMNS, rounded up, SPLITS, num_rows / ROWS, rounded up). The program of a tile that is done last
    adds up the parts, always in the same order.

    Args:
        x: [num_rows, inputs].
        weight: [outputs, inputs / 2] uint8 if IS_PACKED: of each 2 * HALF inputs the first HALF in the lower four bits
            of HALF bytes, the others in the upper ones, so that no two numbers of a byte have to be put next to each
            other. A number is 8 more than the integer that it stands for. Otherwise [outputs, inputs] 8-bit floats.
        scales: [inputs / group, rounded up, outputs] float32, factors on the numbers; HALF divides ``group``.
        offsets: The same shape, added to a weight, read if HAS_OFFSETS.
        bias: [outputs], read if HAS_BIAS.
        out: [num_rows, outputs].
        partial: [SPLITS, num_rows, outputs] float32. Written, as ``arrived``, if there are several splits.
        arrived: [tiles of outputs * tiles of rows] int32, zeros, which it leaves.
        EVEN: Whether COLUMNS divides ``outputs``.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns, rows = tile * COLUMNS + tl.arange(0, COLUMNS), row_tile * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, HALF)
    is_row, is_column = rows < num_rows, columns < outputs
    at_x = rows.to(tl.int64)[:, None] * inputs + half[None, :]
    at_weight = columns.to(tl.int64)[:, None] * (inputs // 2 if IS_PACKED else inputs) + half[None, :]
    # Transposed: the tensor cores take the first factor from registers, where the integers are made.
    parts = tl.zeros([COLUMNS, ROWS], tl.float32)
    num_blocks = inputs // (2 * HALF)
    per_split = tl.cdiv(num_blocks, SPLITS)
    for block in tl.range(split * per_split, tl.minimum((split + 1) * per_split, num_blocks)):
        begin = 2 * HALF * block
        low_x = tl.load(x + at_x + begin, mask=is_row[:, None], other=0.0)
        high_x = tl.load(x + at_x + begin + HALF, mask=is_row[:, None], other=0.0)
        if IS_PACKED:
            codes = _numbers(weight + at_weight + HALF * block, is_column, EVEN)
            low = ((codes & 15).to(tl.int8) - 8).to(x.dtype.element_ty)
            high = ((codes >> 4).to(tl.int8) - 8).to(x.dtype.element_ty)
        else:
            low = _numbers(weight + at_weight + begin, is_column, EVEN).to(x.dtype.element_ty)
            high = _numbers(weight + at_weight + begin + HALF, is_column, EVEN).to(x.dtype.element_ty)
        at_low, at_high = begin // group * outputs + columns, (begin + HALF) // group * outputs + columns
        # The numbers are exact in every dtype. Scaling what is found costs ROWS numbers for each output, scaling the
        # weight HALF of them, which would be rounded in addition.
        parts += tl.dot(low, tl.trans(low_x), input_precision="ieee") * _column_of(scales, at_low, is_column)
        parts += tl.dot(high, tl.trans(high_x), input_precision="ieee") * _column_of(scales, at_high, is_column)
        if HAS_OFFSETS:
            parts += tl.sum(low_x.to(tl.float32), 1)[None, :] * _column_of(offsets, at_low, is_column)
            parts += tl.sum(high_x.to(tl.float32), 1)[None, :] * _column_of(offsets, at_high, is_column)

    found = tl.trans(parts)
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    is_result = is_row[:, None] & is_column[None, :]
    if SPLITS > 1:
        size = num_rows.to(tl.int64) * outputs
        tl.store(partial + split * size + at, found, mask=is_result)
        # All threads have written before one says so, and who finds the number of the others sees their results.
        tl.debug_barrier()
        own = arrived + row_tile * tl.num_programs(0) + tile
        is_last = tl.atomic_add(own, 1) == SPLITS - 1
        is_result = is_result & is_last
        found = tl.zeros([ROWS, COLUMNS], tl.float32)
        for other in tl.range(0, tl.where(is_last, SPLITS, 0)):
            found += tl.load(partial + other * size + at, mask=is_result, other=0.0)
        tl.store(own, 0, mask=is_last)
    if HAS_BIAS:
        found += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=is_result)


@triton.jit
def _numbers(at, is_column, EVEN: tl.constexpr):
    if EVEN:
        found = tl.load(at, eviction_policy="evict_first")
    else:
        found = tl.load(at, mask=is_column[:, None], other=0.0)
    return found


@triton.jit
def _column_of(numbers, at, is_column):
    return tl.load(numbers + at, mask=is_column, other=0.0)[:, None]


@triton.jit
def unpack(
    weight,
    scales,
    offsets,
    out,
    inputs,
    outputs,
    group,
    IS_PACKED: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write 2 * HALF inputs of COLUMNS outputs of the weight that :func:`packed_product` reads to ``out`` [outputs,
    inputs], rounded once.

    Grid: (outputs / COLUMNS, rounded up, inputs / (2 * HALF)).
    """
    columns, block = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    half, is_column = tl.arange(0, HALF), columns < outputs
    for part in tl.static_range(2):
        begin = 2 * HALF * block + HALF * part
        to = columns.to(tl.int64)[:, None] * inputs + begin + half[None, :]
        if IS_PACKED:
            at = columns.to(tl.int64)[:, None] * (inputs // 2) + half[None, :] + HALF * block
            codes = tl.load(weight + at, mask=is_column[:, None], other=0)
            numbers = (((codes >> 4 * part) & 15).to(tl.int32) - 8).to(tl.float32)
        else:
            numbers = tl.load(weight + to, mask=is_column[:, None], other=0.0).to(tl.float32)
        at_scale = begin // group * outputs + columns
        numbers *= tl.load(scales + at_scale, mask=is_column, other=0.0)[:, None]
        if HAS_OFFSETS:
            numbers += tl.load(offsets + at_scale, mask=is_column, other=0.0)[:, None]
        tl.store(out + to, numbers.to(out.dtype.element_ty), mask=is_column[:, None])
