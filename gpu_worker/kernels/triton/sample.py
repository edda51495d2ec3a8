"""Draws tokens by the rule of ``sampler.Sampler``, one program a row, without sorting the vocabulary.

Top-k, min-p and top-p each keep a prefix of one order: larger first, and among equals the lower id. So what they keep
is a threshold, and how many of the tokens that equal it count. The threshold is found digit by digit, two bits a pass
over the row: floats become integers of the same order, and the largest integer is wanted that enough tokens, or enough
mass, still reach. A row stays in the L2 cache between passes.
"""

import triton
import triton.language as tl


@triton.jit
def sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    numbers,
    asking,
    out,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Draw one token. Grid: (rows,).

    Args:
        logits: [rows, vocab] float32; rows lie ``row_stride`` elements apart.
        temperatures, top_ps, min_ps: [all that ask] float64. A temperature of 0 takes the largest logit.
        top_ks: [all that ask] int32; 0: no limit.
        asking: [rows] int64: where in these arrays each row's parameters stand.
        numbers: [rows] float64: the uniform number in [0, 1) of each row's draw.
        out: [rows] int64. -1: no logit of the row is finite; -2: all are -inf. A row whose largest logit is not finite,
            but which has a finite one, gives the first NaN, or else the first of the largest.
        WIDTH: Logits that one turn of a loop reads. PARTS: a power of two, at least vocab / WIDTH.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    largest, best, is_drawable = find_best(base, vocab, WIDTH)
    place = tl.load(asking + row)
    temperature = tl.load(temperatures + place)
    token = best.to(tl.int64)
    if is_drawable & (temperature != 0.0):
        top_k, top_p, min_p = tl.load(top_ks + place), tl.load(top_ps + place), tl.load(min_ps + place)
        threshold, num_equal = _limits(base, vocab, largest, temperature, top_k, top_p, min_p, WIDTH)
        number = tl.load(numbers + row)
        token = _draw(base, vocab, largest, temperature, threshold, num_equal, number, WIDTH, PARTS)
    tl.store(out + row, token)


@triton.jit
def ordered(x):
    """Return uint32 in the order of float32 ``x``; both zeros give the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def find_best(base, vocab, WIDTH: tl.constexpr):
    """Return the largest logit, the token of a greedy draw (-1: no logit is finite; -2: all are -inf), and whether the
    row has a distribution."""
    lanes = tl.arange(0, WIDTH)
    values = tl.full([WIDTH], float("-inf"), tl.float32)
    places = lanes
    first_nan = tl.full([WIDTH], 2147483647, tl.int32)
    num_finite = tl.zeros([WIDTH], tl.int32)
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        first_nan = tl.where(x != x, tl.minimum(first_nan, at), first_nan)
        num_finite += (tl.abs(x) < float("inf")).to(tl.int32)
        is_better = x > values
        places = tl.where(is_better, at, places)
        values = tl.where(is_better, x, values)
    largest = tl.max(values, 0)
    best = tl.min(tl.where(values == largest, places, 2147483647), 0)
    nan = tl.min(first_nan, 0)
    is_drawable = (nan == 2147483647) & (tl.abs(largest) < float("inf"))
    none = tl.where((nan == 2147483647) & (largest == float("-inf")), -2, -1)
    best = tl.where(nan < 2147483647, nan, best)
    return largest, tl.where(tl.sum(num_finite, 0) > 0, best, none), is_drawable


@triton.jit
def _limits(base, vocab, largest, temperature, top_k, top_p, min_p, WIDTH: tl.constexpr):
    """Return the threshold of the tokens that may be drawn, and how many of those that equal it may be."""
    lowest = tl.zeros([1], tl.uint32)
    num_equal = tl.full([1], 2147483647, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        lowest, above = find_reached(base, vocab, largest, temperature, lowest, top_k.to(tl.float32), 0.0, False, WIDTH)
        num_equal = top_k - above.to(tl.int32)
    if min_p > 0.0:
        limit = (largest.to(tl.float64) + temperature * tl.log(min_p)).to(tl.float32)
        by_min_p = ordered(tl.zeros([1], tl.float32) + limit)
        num_equal = tl.where(by_min_p > lowest, 2147483647, num_equal)
        lowest = tl.where(by_min_p > lowest, by_min_p, lowest)
    if top_p < 1.0:
        above, equal_mass, equal_count = _mass(base, vocab, largest, temperature, lowest, WIDTH)
        each = equal_mass / tl.maximum(equal_count, 1.0)
        total = above + each * tl.minimum(equal_count, num_equal.to(tl.float32))
        target = total * top_p.to(tl.float32)
        found, above = find_reached(base, vocab, largest, temperature, lowest, target, total, True, WIDTH)
        if tl.max(found, 0) > tl.max(lowest, 0):
            num_equal = tl.full([1], 2147483647, tl.int32)
        lowest = found
        _, equal_mass, equal_count = _mass(base, vocab, largest, temperature, lowest, WIDTH)
        each = equal_mass / tl.maximum(equal_count, 1.0)
        needed = tl.ceil((target - above) / tl.maximum(each, 1e-38))
        num_equal = tl.minimum(num_equal.to(tl.float32), tl.maximum(needed, 1.0)).to(tl.int32)
    return tl.max(lowest, 0), tl.max(num_equal, 0)


@triton.jit
def _weights(x, largest, temperature):
    """Return the unnormalised float32 probabilities of logits ``x``."""
    return tl.exp((x - largest) / temperature.to(tl.float32))


@triton.jit
def _mass(base, vocab, largest, temperature, limit, WIDTH: tl.constexpr):
    """Return the mass of the tokens above ``limit`` [1], and mass and number of those that equal it, each [1]."""
    lanes = tl.arange(0, WIDTH)
    above = tl.zeros([WIDTH], tl.float32)
    equal = tl.zeros([WIDTH], tl.float32)
    count = tl.zeros([WIDTH], tl.float32)
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        keys, weights = ordered(x), _weights(x, largest, temperature)
        above += tl.where(keys > limit, weights, 0.0)
        is_equal = (keys == limit) & (at < vocab)
        equal += tl.where(is_equal, weights, 0.0)
        count += is_equal.to(tl.float32)
    zero = tl.zeros([1], tl.float32)
    return zero + tl.sum(above, 0), zero + tl.sum(equal, 0), zero + tl.sum(count, 0)


@triton.jit
def find_reached(base, vocab, largest, temperature, lowest, wanted, total, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest integer, [1], that so much of the row reaches, and how much is above it.

    What is measured is mass, or with BY_MASS false the number of tokens. ``lowest`` is known to be reached by
    ``total``.
    """
    lanes = tl.arange(0, WIDTH)
    found = tl.zeros([1], tl.uint32)
    above = tl.zeros([1], tl.float32)
    shift = tl.full([1], 32, tl.uint32)
    # Sixteen passes of two bits and no sort of [rows, vocabulary] in 64-bit integers. It is slow for a single row,
    # which one multiprocessor reads alone.
    for _ in tl.range(0, 16):
        shift = (shift - 2).to(tl.uint32)
        one = found | (tl.full([1], 1, tl.uint32) << shift)
        two = found | (tl.full([1], 2, tl.uint32) << shift)
        three = found | (tl.full([1], 3, tl.uint32) << shift)
        by_one = tl.zeros([WIDTH], tl.float32)
        by_two = tl.zeros([WIDTH], tl.float32)
        by_three = tl.zeros([WIDTH], tl.float32)
        for begin in tl.range(0, vocab, WIDTH):
            at = begin + lanes
            x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
            keys = ordered(x)
            if BY_MASS:
                measure = _weights(x, largest, temperature)
            else:
                measure = (at < vocab).to(tl.float32)
            by_one += tl.where(keys >= one, measure, 0.0)
            by_two += tl.where(keys >= two, measure, 0.0)
            by_three += tl.where(keys >= three, measure, 0.0)
        m1 = tl.where(one <= lowest, total, tl.sum(by_one, 0))
        m2 = tl.where(two <= lowest, total, tl.sum(by_two, 0))
        m3 = tl.where(three <= lowest, total, tl.sum(by_three, 0))
        above = tl.where(m3 >= wanted, above, tl.where(m2 >= wanted, m3, tl.where(m1 >= wanted, m2, m1)))
        found = tl.where(m3 >= wanted, three, tl.where(m2 >= wanted, two, tl.where(m1 >= wanted, one, found)))
    return found, above


@triton.jit
def _kept_weights(base, at, vocab, largest, temperature, threshold, num_equal, num_before):
    """Return the float64 probabilities of the tokens ``at``, 0 for those that may not be drawn, and how many of them
    equal the threshold. ``num_before``: how many tokens before them do."""
    x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    keys = ordered(x)
    weights = tl.exp((x.to(tl.float64) - largest.to(tl.float64)) / temperature)
    is_equal = ((keys == threshold) & (at < vocab)).to(tl.int32)
    count = tl.sum(is_equal, 0)
    is_kept = keys >= threshold
    if num_before + count > num_equal:
        rank = tl.cumsum(is_equal, 0) + num_before
        is_kept = is_kept & ((is_equal == 0) | (rank <= num_equal))
    return tl.where(is_kept & (at < vocab), weights, 0.0), count


@triton.jit
def _draw(
    base,
    vocab,
    largest,
    temperature,
    threshold,
    num_equal,
    number,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the first token at which the running sum of the kept probabilities passes ``number`` of the whole."""
    lanes, parts = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    sums = tl.zeros([PARTS], tl.float64)
    befores = tl.zeros([PARTS], tl.int32)
    num_before = 0
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        weights, count = _kept_weights(base, at, vocab, largest, temperature, threshold, num_equal, num_before)
        is_part = parts == begin // WIDTH
        sums = tl.where(is_part, tl.sum(weights, 0), sums)
        befores = tl.where(is_part, num_before, befores)
        num_before += count
    running = tl.cumsum(sums, 0)
    target = number * tl.sum(sums, 0)
    last = tl.max(tl.where(sums > 0.0, parts, 0), 0)
    part = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(parts < part, sums, 0.0), 0)
    num_before = tl.sum(tl.where(parts == part, befores, 0), 0)

    at = part * WIDTH + lanes
    weights, _ = _kept_weights(base, at, vocab, largest, temperature, threshold, num_equal, num_before)
    running = tl.cumsum(weights, 0) + before
    # A sum that rounds to the target or below it leaves the last token with any mass.
    last = tl.max(tl.where(weights > 0.0, lanes, 0), 0)
    place = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), last)
    return (part * WIDTH + place).to(tl.int64)
