"""Draws tokens by the rule of ``sampler.Sampler``, one program a row, without sorting the vocabulary.

Top-k, min-p and top-p each keep a prefix of one order: larger first, and among equals the lower id. So what they keep
is a threshold, and how many of the tokens that equal it count. Weights are integers, so that every sum is exact and the
token is the host's; they need no float64 unit, of which most GPUs have few.

A threshold is searched among few candidates: the maxima of the lanes in which a program reads its row bound it, and
what reaches the bound is listed. Only where these are more than a program holds, or less than the mass that is wanted,
the interval of the threshold is divided by passes over the row. A row stays in the L2 cache between passes.

``sample_parts`` reads rows with several programs each, where few rows would leave most of a GPU idle.
"""

import triton
import triton.language as tl

_STEPS = tl.constexpr(20)  # sampler.py explains the constants of `_weigh`
_WITHIN = tl.constexpr((1 << 20) - 1)
_CUT = tl.constexpr(float(41 << 20))
_BELOW = tl.constexpr(float(42 << 20))
_RATE = tl.constexpr(1.4426950408889634 * (1 << 20))
_WHOLE = tl.constexpr(float(1 << 40))
LEAST_KEY, LARGEST_KEY = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
"""Of NaN: no key of a row that is drawn from."""
_PASSES = tl.constexpr(3)
"""Over the row before candidates are listed again: each leaves a quarter of the interval."""


@triton.jit
def sample(
    logits,
    temperatures,
    top_ps,
    min_ps,
    numbers,
    top_ks,
    asking,
    listed,
    out,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Draw one token. Grid: (rows,). Products and sums must not be fused.

    Args:
        logits: [rows, vocab] float32; rows lie ``row_stride`` elements apart.
        temperatures, top_ps, min_ps: [all that ask] float64. A temperature of 0 takes the largest logit.
        top_ks: [all that ask] int32; 0: no limit.
        asking: [rows] int64: where in these arrays each row's parameters stand.
        numbers: [rows] float64: the uniform number in [0, 1) of each row's draw.
        listed: [rows, WIDTH] int32, memory for candidates.
        out: [rows] int64. -1: no logit of the row is finite; -2: all are -inf. A row whose largest logit is not finite,
            but which has a finite one, gives the first NaN, or else the first of the largest.
        WIDTH: Logits that one turn of a loop reads. PARTS: a power of two, at least vocab / WIDTH.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    listed += row.to(tl.int64) * WIDTH
    largest, best, is_drawable, maxima = find_best(base, vocab, WIDTH)
    place = tl.load(asking + row)
    temperature = tl.load(temperatures + place)
    token = best.to(tl.int64)
    if is_drawable & (temperature != 0.0):
        top_k, top_p = tl.load(top_ks + place), tl.load(top_ps + place)
        rate, least = scales(temperature, tl.load(min_ps + place))
        threshold, num_equal = limits_of(base, vocab, maxima, listed, largest, rate, least, top_k, top_p, WIDTH)
        number = tl.load(numbers + row)
        token = draw_within(base, vocab, largest, rate, least, threshold, num_equal, number, WIDTH, PARTS)
    tl.store(out + row, token)


@triton.jit
def scales(temperature, min_p):
    """Return what differences of logits are multiplied by, float32, and the least weight that min-p leaves, int64."""
    rate = tl.full((), _RATE, tl.float64) / temperature
    rate = tl.minimum(tl.maximum(rate, 1.1754943508222875e-38), 3.4028234663852886e38)
    return rate.to(tl.float32), tl.ceil(tl.maximum(min_p, 0.0) * _WHOLE).to(tl.int64)


@triton.jit
def ordered(x):
    """Return int32 in the order of float32 ``x``; both zeros give the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ LARGEST_KEY, bits)


@triton.jit
def value_of(key):
    """Return the float32 of which ``key`` is the place in the order."""
    return tl.where(key < 0, key ^ LARGEST_KEY, key).to(tl.float32, bitcast=True)


@triton.jit
def find_best(base, vocab, WIDTH: tl.constexpr):
    """Return the largest logit, the token of a greedy draw (-1: no logit is finite; -2: all are -inf), whether the row
    has a distribution, and the largest logit of each lane, [WIDTH]."""
    values, place, nan, num_finite = scan(base, vocab, WIDTH)
    largest = tl.max(values, 0)
    best, is_drawable = greedy(largest, place, nan, num_finite)
    return largest, best, is_drawable, values


@triton.jit
def scan(base, size, WIDTH: tl.constexpr):
    """Return the largest logit of each lane, [WIDTH], and of all ``size`` logits the first place of the largest, the
    first of a NaN (LARGEST_KEY: there is none), and how many are finite."""
    lanes = tl.arange(0, WIDTH)
    values = tl.full([WIDTH], float("-inf"), tl.float32)
    places = lanes
    first_nan = tl.full([WIDTH], LARGEST_KEY, tl.int32)
    num_finite = tl.zeros([WIDTH], tl.int32)
    for begin in tl.range(0, size, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < size, other=float("-inf"))
        first_nan = tl.where(x != x, tl.minimum(first_nan, at), first_nan)
        num_finite += (tl.abs(x) < float("inf")).to(tl.int32)
        is_better = x > values
        places = tl.where(is_better, at, places)
        values = tl.where(is_better, x, values)
    place = tl.min(tl.where(values == tl.max(values, 0), places, LARGEST_KEY), 0)
    return values, place, tl.min(first_nan, 0), tl.sum(num_finite, 0)


@triton.jit
def greedy(largest, place, nan, num_finite):
    """Return the token of a greedy draw, as :func:`find_best` does, and whether the row has a distribution."""
    has_nan = nan < LARGEST_KEY
    none = tl.where(has_nan | (largest > float("-inf")), -1, -2)
    best = tl.where(num_finite > 0, tl.where(has_nan, nan, place), none)
    return best, (tl.abs(largest) < float("inf")) & (nan == LARGEST_KEY)


@triton.jit
def weigh(x, largest, rate, least):
    """Return the weights, int64, of logits ``x`` as ``sampler.weigh`` does, and 0 for those below ``least``."""
    power = tl.minimum((largest - x) * rate, _CUT)
    steps = power.to(tl.int32)
    within = (steps & _WITHIN).to(tl.float32)
    octave = within * -1.2608238277515058e-26 + 1.280211278176982e-19
    octave = octave * within - 8.049192280583373e-13
    octave = octave * within + 3.664941687020473e-06
    octave = octave * within - 11.090309143066406
    octave = octave * within + 16777216.0
    weights = (octave.to(tl.int32).to(tl.int64) << 16) >> (steps >> _STEPS).to(tl.int64)
    return tl.where(weights >= least, weights, 0)


@triton.jit
def limits_of(base, vocab, maxima, listed, largest, rate, least, top_k, top_p, WIDTH: tl.constexpr):
    """Return the threshold of the tokens that may be drawn, and how many of those that equal it may be; tokens of which
    min-p leaves no weight are not excluded by it."""
    threshold = tl.full((), LEAST_KEY, tl.int32)
    num_equal = tl.full((), 9223372036854775807, tl.int64)
    is_limited = (top_k > 0) & (top_k < vocab)
    if is_limited:
        hint = lane_bound(maxima, top_k, WIDTH)
        threshold, above = find_reached(
            base, vocab, hint, listed, largest, rate, least, top_k.to(tl.int64), False, WIDTH
        )
        num_equal = top_k - above
    if top_p < 1.0:
        hint = threshold
        if not is_limited:
            hint = lane_bound(maxima, WIDTH // 4, WIDTH)
        total = _mass(base, vocab, largest, rate, least, threshold, num_equal, WIDTH)
        target = kept_mass(total, top_p)
        found, above = find_reached(base, vocab, hint, listed, largest, rate, least, target, True, WIDTH)
        num_equal = kept_equal(threshold, num_equal, found, target - above, largest, rate, least)
        threshold = found
    return threshold, num_equal


@triton.jit
def kept_mass(total, top_p):
    """Return how much of the mass ``total`` top-p keeps."""
    target = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.maximum(tl.minimum(target, total), 1)


@triton.jit
def kept_equal(threshold, num_equal, found, mass, largest, rate, least):
    """Return how many tokens that equal ``found``, the threshold of top-p, have the ``mass`` that those above it lack;
    at most ``num_equal`` if it is the ``threshold`` of top-k, too."""
    each = tl.maximum(weigh(value_of(found), largest, rate, least), 1)
    needed = (mass + each - 1) // each
    return tl.where(found > threshold, needed, tl.minimum(num_equal, needed))


@triton.jit
def _mass(base, vocab, largest, rate, least, threshold, num_equal, WIDTH: tl.constexpr):
    """Return the mass of the tokens that a threshold leaves."""
    lanes = tl.arange(0, WIDTH)
    above = tl.zeros([WIDTH], tl.int64)
    count = tl.zeros([WIDTH], tl.int32)
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        keys, weights = ordered(x), weigh(x, largest, rate, least)
        above += tl.where(keys > threshold, weights, 0)
        count += ((keys == threshold) & (at < vocab)).to(tl.int32)
    num_equal = tl.minimum(tl.sum(count, 0).to(tl.int64), num_equal)
    # No logit equals the least key, which stands for no threshold and whose value is no number.
    each = tl.where(num_equal > 0, weigh(value_of(threshold), largest, rate, least), 0)
    return tl.sum(above, 0) + num_equal * each


@triton.jit
def lane_bound(maxima, wanted, WIDTH: tl.constexpr):
    """Return a key that at least ``wanted`` logits reach, and not many more, if ``wanted`` is at most WIDTH: that of
    one of the ``maxima`` of lanes, [WIDTH]."""
    return bound(ordered(maxima), wanted, WIDTH)


@triton.jit
def bound(keys, wanted, WIDTH: tl.constexpr):
    """Return the largest of the keys [WIDTH] that ``wanted`` of them reach; of all, if it is more than there are."""
    ones = tl.full([WIDTH], 1, tl.int64)
    lowest, end = tl.full((), LEAST_KEY, tl.int64), tl.full((), LARGEST_KEY, tl.int64)
    found, _ = find_among(keys, ones, tl.minimum(wanted, WIDTH).to(tl.int64), lowest, end)
    return found


@triton.jit
def find_reached(base, vocab, hint, listed, largest, rate, least, wanted, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the largest key, int32, that so much of the row reaches, and how much is above it, int64.

    What is measured is mass, or with BY_MASS false the number of tokens. ``hint``: a key that the search begins with;
    the better it is, the fewer are the passes. ``listed``: [WIDTH] int32, memory for candidates. The whole row must
    reach ``wanted``, which is at least 1.
    """
    lowest, end = tl.full((), LEAST_KEY, tl.int64), ordered(largest).to(tl.int64) + 1
    if BY_MASS:  # what lies 42 powers of two below weighs nothing
        lowest = ordered(largest - tl.full((), _BELOW, tl.float32) / rate).to(tl.int64)
    above = tl.full((), 0, tl.int64)
    begin = tl.maximum(hint.to(tl.int64), lowest)
    turn = 0
    while end - lowest > 1:
        count, measure = _list(base, vocab, begin, end, listed, largest, rate, least, BY_MASS, WIDTH)
        if above + measure < wanted:
            end = begin
            above += measure
        else:
            lowest = begin
            if count <= WIDTH:
                keys, measures = _listed(base, listed, count, largest, rate, least, BY_MASS, WIDTH)
                found, more = find_among(keys, measures, wanted - above, lowest, end)
                lowest = found.to(tl.int64)
                end = lowest + 1
                above += more
        for _ in tl.range(0, _PASSES):
            if end - lowest > 1:
                one, two, three = _pivots(lowest, end, BY_MASS & (turn == 0))
                by_one, by_two, by_three = _measure(base, vocab, one, two, three, largest, rate, least, BY_MASS, WIDTH)
                lowest, end, above = _narrowed(lowest, end, above, wanted, one, two, three, by_one, by_two, by_three)
        begin = lowest
        turn += 1
    return lowest.to(tl.int32), above


@triton.jit
def _list(base, vocab, begin, end, listed, largest, rate, least, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """List the tokens whose keys are in [begin, end), ascending, as many as there is memory for. Return how many there
    are, and their measure."""
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.int64)
    count = 0
    tl.debug_barrier()
    for first in tl.range(0, vocab, WIDTH):
        at = first + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        keys = ordered(x)
        is_in = (keys >= begin.to(tl.int32)) & (keys < end.to(tl.int32)) & (at < vocab)
        if BY_MASS:
            sums += tl.where(is_in, weigh(x, largest, rate, least), 0)
        here = tl.sum(is_in.to(tl.int32), 0)
        if here > 0:
            place = count + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(listed + place, at, mask=is_in & (place < WIDTH))
        count += here
    tl.debug_barrier()
    measure = tl.full((), 0, tl.int64) + count
    if BY_MASS:
        measure = tl.sum(sums, 0)
    return count, measure


@triton.jit
def _listed(base, listed, count, largest, rate, least, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the keys of the listed tokens, [WIDTH], and their measures, which are 0 behind them."""
    lanes = tl.arange(0, WIDTH)
    at = tl.load(listed + lanes, mask=lanes < count, other=0)
    x = tl.load(base + at, mask=lanes < count, other=float("-inf"))
    if BY_MASS:
        measures = weigh(x, largest, rate, least)
    else:
        measures = (lanes < count).to(tl.int64)
    return ordered(x), measures


@triton.jit
def find_among(keys, measures, wanted, lowest, end):
    """Return the largest key in [lowest, end), int32, that ``wanted`` of the measures reach, and how much is above."""
    above = tl.full((), 0, tl.int64)
    while end - lowest > 1:
        one, two, three = _pivots(lowest, end, False)
        by_one = tl.sum(tl.where(keys >= one.to(tl.int32), measures, 0), 0)
        by_two = tl.sum(tl.where(keys >= two.to(tl.int32), measures, 0), 0)
        by_three = tl.sum(tl.where(keys >= three.to(tl.int32), measures, 0), 0)
        lowest, end, above = _narrowed(lowest, end, above, wanted, one, two, three, by_one, by_two, by_three)
    return lowest.to(tl.int32), above


@triton.jit
def _pivots(lowest, end, by_value):
    """Return three keys, ascending, that divide (lowest, end) into quarters: of its keys, or ``by_value`` of the
    logits, as keys are dense around zero."""
    quarter = (end - lowest) // 4
    low, step = value_of(lowest.to(tl.int32)), (value_of(end.to(tl.int32)) - value_of(lowest.to(tl.int32))) * 0.25
    one = tl.where(by_value, ordered(low + step).to(tl.int64), lowest + quarter)
    two = tl.where(by_value, ordered(low + 2.0 * step).to(tl.int64), lowest + 2 * quarter)
    three = tl.where(by_value, ordered(low + 3.0 * step).to(tl.int64), lowest + 3 * quarter)
    first, last = lowest + 1, end - 1
    return (
        tl.minimum(tl.maximum(one, first), last),
        tl.minimum(tl.maximum(two, first), last),
        tl.minimum(tl.maximum(three, first), last),
    )


@triton.jit
def _narrowed(lowest, end, above, wanted, one, two, three, by_one, by_two, by_three):
    """Return the part of an interval in which the key is that ``wanted`` reaches, and how much is above the part, by
    what reaches each of three keys."""
    above = tl.where(
        by_three >= wanted, above, tl.where(by_two >= wanted, by_three, tl.where(by_one >= wanted, by_two, by_one))
    )
    end = tl.where(by_three >= wanted, end, tl.where(by_two >= wanted, three, tl.where(by_one >= wanted, two, one)))
    lowest = tl.where(
        by_three >= wanted, three, tl.where(by_two >= wanted, two, tl.where(by_one >= wanted, one, lowest))
    )
    return lowest, end, above


@triton.jit
def _measure(base, vocab, one, two, three, largest, rate, least, BY_MASS: tl.constexpr, WIDTH: tl.constexpr):
    """Return how much of the row reaches each of three keys, int64."""
    lanes = tl.arange(0, WIDTH)
    by_one = tl.zeros([WIDTH], tl.int64)
    by_two = tl.zeros([WIDTH], tl.int64)
    by_three = tl.zeros([WIDTH], tl.int64)
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        keys = ordered(x)
        if BY_MASS:
            measures = weigh(x, largest, rate, least)
        else:
            measures = (at < vocab).to(tl.int64)
        by_one += tl.where(keys >= one.to(tl.int32), measures, 0)
        by_two += tl.where(keys >= two.to(tl.int32), measures, 0)
        by_three += tl.where(keys >= three.to(tl.int32), measures, 0)
    return tl.sum(by_one, 0), tl.sum(by_two, 0), tl.sum(by_three, 0)


@triton.jit
def _kept_weights(base, at, vocab, largest, rate, least, threshold, num_equal, num_before):
    """Return the weights of the tokens ``at``, 0 for those that may not be drawn, and how many of them equal the
    threshold. ``num_before``: how many tokens before them do."""
    x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    keys, weights = ordered(x), weigh(x, largest, rate, least)
    is_equal = ((keys == threshold) & (at < vocab)).to(tl.int32)
    count = tl.sum(is_equal, 0)
    is_kept = keys >= threshold
    if num_before + count > num_equal:
        rank = tl.cumsum(is_equal, 0) + num_before
        is_kept = is_kept & ((is_equal == 0) | (rank <= num_equal))
    return tl.where(is_kept & (at < vocab), weights, 0), count


@triton.jit
def draw_within(
    base,
    vocab,
    largest,
    rate,
    least,
    threshold,
    num_equal,
    number,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the first token at which the running sum of the kept weights passes ``number`` of the whole."""
    lanes, parts = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    sums = tl.zeros([PARTS], tl.int64)
    befores = tl.zeros([PARTS], tl.int32)
    num_before = 0
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        weights, count = _kept_weights(base, at, vocab, largest, rate, least, threshold, num_equal, num_before)
        is_part = parts == begin // WIDTH
        sums = tl.where(is_part, tl.sum(weights, 0), sums)
        befores = tl.where(is_part, num_before, befores)
        num_before += count
    target = target_of(tl.sum(sums, 0), number)
    part, before = passed(sums, target)
    num_before = tl.sum(tl.where(parts == part, befores, 0), 0)
    at = part * WIDTH + lanes
    weights, _ = _kept_weights(base, at, vocab, largest, rate, least, threshold, num_equal, num_before)
    place, _ = passed(weights, target - before)
    return (part * WIDTH + place).to(tl.int64)


@triton.jit
def target_of(total, number):
    """Return the sum of weights which the token that is drawn passes."""
    return tl.minimum((total.to(tl.float64) * number).to(tl.int64), total - 1)


@triton.jit
def passed(weights, target):
    """Return the first place at which the running sum of the weights [n] passes ``target``, and the sum before it."""
    is_before = tl.cumsum(weights, 0) <= target
    return tl.sum(is_before.to(tl.int32), 0), tl.sum(tl.where(is_before, weights, 0), 0)
