"""Draws tokens as ``sample`` does, with several programs a row: where rows are few, one program for each leaves most
multiprocessors idle, and takes long to read its row again and again.

``scan_parts`` and ``list_parts`` give each part of a row a program, and ``draw_listed`` reads what they have listed.
Without filters it reads the part in which the running sum of all weights passes the row's number. Sums are of integers,
so the token is the same however a row is divided.
"""

import triton
import triton.language as tl

from .sample import (
    LARGEST_KEY,
    LEAST_KEY,
    bound,
    draw_within,
    find_among,
    find_best,
    greedy,
    kept_equal,
    kept_mass,
    limits_of,
    ordered,
    passed,
    scales,
    scan,
    target_of,
    value_of,
    weigh,
)


@triton.jit
def scan_parts(logits, memory, vocab, row_stride, memory_stride, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Scan WIDTH logits of a row. Grid: (rows, parts), with parts = vocab / WIDTH, rounded up.

    Args:
        logits: [rows, vocab] float32; rows lie ``row_stride`` elements apart.
        memory: [rows, memory_stride] int32, of each row [parts, GROUPS]: the keys of the largest logits of the groups
            that its parts have; [parts] each: the first place of a part's largest logit, of a NaN, how many logits are
            finite, and how many are listed; [parts, ROOM]: the tokens that are listed.
    """
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    begin = part * WIDTH
    base = logits + row.to(tl.int64) * row_stride + begin
    memory += row.to(tl.int64) * memory_stride
    values, place, nan, num_finite = scan(base, tl.minimum(vocab - begin, WIDTH), WIDTH)
    largest = tl.max(tl.reshape(values, [GROUPS, WIDTH // GROUPS]), 1)
    tl.store(memory + part * GROUPS + tl.arange(0, GROUPS), ordered(largest))
    memory += num_parts * GROUPS + part
    tl.store(memory, begin + place)
    tl.store(memory + num_parts, tl.where(nan < LARGEST_KEY, begin + nan, nan))
    tl.store(memory + 2 * num_parts, num_finite)


@triton.jit
def list_parts(
    logits,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    asking,
    memory,
    masses,
    vocab,
    row_stride,
    memory_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
):
    """List the candidates of a part, ascending, and add up the weights of all its tokens. Grid: (rows, parts).

    The arguments are those of :func:`sample` and :func:`scan_parts`. ``masses``: [rows, parts] int64. LANES: a power of
    two, at least parts * GROUPS. A row whose filters leave all tokens has no candidates.
    """
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    memory += row.to(tl.int64) * memory_stride
    groups, lanes = tl.arange(0, LANES), tl.arange(0, WIDTH)
    bounds = tl.load(memory + groups, mask=groups < num_parts * GROUPS, other=LEAST_KEY)
    largest = value_of(tl.max(bounds, 0))
    place = tl.load(asking + row)
    temperature = tl.load(temperatures + place)
    if (temperature != 0.0) & (tl.abs(largest) < float("inf")):
        top_k, top_p = tl.load(top_ks + place), tl.load(top_ps + place)
        rate, least = scales(temperature, tl.load(min_ps + place))
        at = part * WIDTH + lanes
        x = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < vocab, other=float("-inf"))
        tl.store(masses + row * num_parts + part, tl.sum(weigh(x, largest, rate, least), 0))
        hint = tl.full((), LARGEST_KEY, tl.int32)
        if (top_k > 0) & (top_k < vocab):
            hint = bound(bounds, top_k, LANES)
        elif top_p < 1.0:
            hint = bound(bounds, tl.minimum(WIDTH // 4, num_parts * (GROUPS // 2)), LANES)
        # Masked logits, of which a grammar makes most of a row, weigh nothing and would leave no room.
        is_listed = (x > float("-inf")) & (ordered(x) >= hint)
        places = tl.cumsum(is_listed.to(tl.int32), 0) - 1
        memory += num_parts * GROUPS
        tl.store(memory + 3 * num_parts + part, tl.sum(is_listed.to(tl.int32), 0))
        tl.store(memory + 4 * num_parts + part * ROOM + places, at, mask=is_listed & (places < ROOM))


@triton.jit
def draw_listed(
    logits,
    temperatures,
    top_ps,
    min_ps,
    numbers,
    top_ks,
    asking,
    memory,
    masses,
    out,
    vocab,
    row_stride,
    memory_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Draw one token from what the parts of its row have listed. Grid: (rows,). The arguments are those of the others.

    Where the candidates are not all that filters may leave, or are more than a program holds, it does what
    :func:`sample` does; ``memory`` has WIDTH places behind the numbers of each row for that.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    memory += row.to(tl.int64) * memory_stride
    num_parts = tl.cdiv(vocab, WIDTH)
    parts, lanes = tl.arange(0, PARTS), tl.arange(0, WIDTH)
    is_part = parts < num_parts
    at = parts[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    keys = tl.max(tl.load(memory + at, mask=is_part[:, None], other=LEAST_KEY), 1)
    memory += num_parts * GROUPS
    places = tl.load(memory + parts, mask=is_part & (keys == tl.max(keys, 0)), other=LARGEST_KEY)
    nan = tl.min(tl.load(memory + num_parts + parts, mask=is_part, other=LARGEST_KEY), 0)
    num_finite = tl.sum(tl.load(memory + 2 * num_parts + parts, mask=is_part, other=0), 0)
    largest = value_of(tl.max(keys, 0))
    best, is_drawable = greedy(largest, tl.min(places, 0), nan, num_finite)
    asked = tl.load(asking + row)
    temperature = tl.load(temperatures + asked)
    token = best.to(tl.int64)
    if is_drawable & (temperature != 0.0):
        top_k, top_p, number = tl.load(top_ks + asked), tl.load(top_ps + asked), tl.load(numbers + row)
        rate, least = scales(temperature, tl.load(min_ps + asked))
        sums = tl.load(masses + row * num_parts + parts, mask=is_part, other=0)
        total = tl.sum(sums, 0)
        is_limited = (top_k > 0) & (top_k < vocab)
        if is_limited | (top_p < 1.0):
            counts = tl.load(memory + 3 * num_parts + parts, mask=is_part, other=0)
            num_listed = tl.sum(counts, 0)
            # All that can be drawn is listed if top-k finds as many, or if every token is that has a weight.
            is_known = (num_listed <= WIDTH) & (tl.max(counts, 0) <= ROOM)
            is_known = is_known & ((num_listed == num_finite) | (top_k <= num_listed) | (is_limited == 0))
            if is_known:
                tokens = _gather(memory + 3 * num_parts, num_parts, num_listed, WIDTH, ROOM)
                token, is_known = _draw_among(
                    base, tokens, num_listed, total, largest, rate, least, top_k, top_p, number, vocab, WIDTH
                )
            if is_known == 0:
                maxima = find_best(base, vocab, WIDTH)[3]
                listed = memory + 4 * num_parts
                threshold, num_equal = limits_of(base, vocab, maxima, listed, largest, rate, least, top_k, top_p, WIDTH)
                token = draw_within(base, vocab, largest, rate, least, threshold, num_equal, number, WIDTH, PARTS)
        else:
            target = target_of(total, number)
            part, before = passed(sums, target)
            within = part * WIDTH + lanes
            x = tl.load(base + within, mask=within < vocab, other=float("-inf"))
            place, _ = passed(weigh(x, largest, rate, least), target - before)
            token = (part * WIDTH + place).to(tl.int64)
    tl.store(out + row, token)


@triton.jit
def _gather(counts, num_parts, num_listed, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    """Return the listed tokens of all parts, [WIDTH] int32, ascending, and 0 behind them. ``counts``: [num_parts], and
    behind them the lists."""
    lanes = tl.arange(0, WIDTH)
    part_of, begins, end = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.int32), 0
    for part in tl.range(0, num_parts):
        end += tl.load(counts + part)
        part_of += (lanes >= end).to(tl.int32)
        begins = tl.where(lanes >= end, end, begins)
    at = counts + num_parts + part_of * ROOM + lanes - begins
    return tl.load(at, mask=lanes < num_listed, other=0)


@triton.jit
def _draw_among(
    base, tokens, num_listed, total, largest, rate, least, top_k, top_p, number, vocab, WIDTH: tl.constexpr
):
    """Return the token that is drawn, and whether what may be drawn is among the ``tokens`` [WIDTH]; these are all that
    have a weight, or at least ``top_k``, or without top-k any of the largest. ``total``: the mass of the whole row."""
    lanes = tl.arange(0, WIDTH)
    is_listed = lanes < num_listed
    x = tl.load(base + tokens, mask=is_listed, other=float("-inf"))
    keys, weights = ordered(x), weigh(x, largest, rate, least)
    lowest = tl.min(tl.where(is_listed, keys, LARGEST_KEY), 0).to(tl.int64)
    end = ordered(largest).to(tl.int64) + 1
    threshold, mass, num_equal = tl.full((), LEAST_KEY, tl.int32), total, tl.full((), 1 << 62, tl.int64)
    if (top_k > 0) & (top_k < vocab) & (top_k <= num_listed):
        threshold, above = find_among(keys, is_listed.to(tl.int64), top_k.to(tl.int64), lowest, end)
        num_equal = top_k - above
        count = tl.minimum(tl.sum((keys == threshold).to(tl.int64), 0), num_equal)
        mass = tl.sum(tl.where(keys > threshold, weights, 0), 0)
        mass += count * weigh(value_of(threshold), largest, rate, least)
    is_known = True
    if top_p < 1.0:
        target = kept_mass(mass, top_p)
        is_known = tl.sum(weights, 0) >= target
        if is_known:
            found, above = find_among(keys, weights, target, lowest, end)
            num_equal = kept_equal(threshold, num_equal, found, target - above, largest, rate, least)
            threshold = found
    is_equal = (keys == threshold) & is_listed
    is_kept = (keys > threshold) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= num_equal))
    weights = tl.where(is_kept, weights, 0)
    place, _ = passed(weights, target_of(tl.sum(weights, 0), number))
    return tl.sum(tl.where(lanes == place, tokens, 0), 0).to(tl.int64), is_known
