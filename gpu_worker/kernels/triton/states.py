"""Computes layers that keep a state between tokens, one token after the other in float32, as the kernels of a CPU do: a
token has the same bits wherever its prompt is cut, and in any batch.

A *chain* is the runs of one request in a step: each but the first reads the slot that the one before it writes, so one
program computes them in turn. ``read`` and ``written`` [runs] int32 are the slots; a negative one of ``read`` stands
for an empty state. ``starts`` [runs + 1] int32 is where the tokens of a run begin, and ``chains`` [chains + 1] int32
where the runs of a chain do.
"""

import triton
import triton.language as tl


@triton.jit
def _input(x, gate, states, at, begin, slot, columns, channels, row_stride, TAPS: tl.constexpr, HAS_GATE: tl.constexpr):
    """Return the inputs of a convolution at token ``at``, of which those before ``begin`` lie in a slot."""
    is_column = columns < channels
    is_token = is_column & (at >= begin)
    value = tl.load(x + at * row_stride + columns, mask=is_token, other=0.0)
    if HAS_GATE:
        factor = tl.load(gate + at * row_stride + columns, mask=is_token, other=0.0)
        value = (value.to(tl.float32) * factor.to(tl.float32)).to(value.dtype)
    kept = states + (slot * TAPS + at - begin + TAPS) * channels + columns
    return value + tl.load(kept, mask=is_column & (at < begin) & (slot >= 0), other=0.0)


@triton.jit
def short_conv(
    x,
    gate,
    gate_after,
    weight,
    bias,
    states,
    out,
    read,
    written,
    starts,
    chains,
    channels,
    row_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_SILU: tl.constexpr,
    IS_ONE_PART: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Convolve each channel with the tokens before it. Grid: (chains, parts of TOKENS tokens, channels / WIDTH).

    IS_ONE_PART: a chain has no more than TOKENS tokens, and the program also writes the slots; otherwise
    :func:`keep_inputs` does, because another program may not have read them yet.

    Args:
        x, gate, gate_after: [T, channels], rows ``row_stride`` elements apart; what x is multiplied by, and the result.
        weight: [TAPS + 1, channels]; bias: [channels]; states: [slots, TAPS, channels]; out: [T, channels].
    """
    chain, columns = tl.program_id(0), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < channels
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    begin, end = tl.load(starts + first).to(tl.int64), tl.load(starts + last).to(tl.int64)
    slot, origin = tl.load(read + first).to(tl.int64), begin + tl.program_id(1) * TOKENS
    for index in tl.range(0, tl.minimum(end - origin, TOKENS)):
        total = tl.zeros([WIDTH], tl.float32)
        for tap in tl.static_range(TAPS + 1):
            at = origin + index + tap - TAPS
            value = _input(x, gate, states, at, begin, slot, columns, channels, row_stride, TAPS, HAS_GATES)
            factor = tl.load(weight + tap * channels + columns, mask=is_column, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
        if HAS_SILU:
            total *= tl.sigmoid(total)
        result = total.to(out.dtype.element_ty)
        if HAS_GATES:
            after = tl.load(gate_after + (origin + index) * row_stride + columns, mask=is_column, other=0.0)
            result = (result.to(tl.float32) * after.to(tl.float32)).to(result.dtype)
        tl.store(out + (origin + index) * channels + columns, result, mask=is_column)
    if IS_ONE_PART:
        _keep(x, gate, states, read, written, starts, first, last, columns, channels, row_stride, TAPS, HAS_GATES)


@triton.jit
def keep_inputs(
    x,
    gate,
    states,
    read,
    written,
    starts,
    chains,
    channels,
    row_stride,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the last inputs of each run of a convolution to its slot. Grid: (chains, channels / WIDTH)."""
    chain, columns = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    _keep(x, gate, states, read, written, starts, first, last, columns, channels, row_stride, TAPS, HAS_GATES)


@triton.jit
def _keep(
    x,
    gate,
    states,
    read,
    written,
    starts,
    first,
    last,
    columns,
    channels,
    row_stride,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    # Every thread reads and writes its own columns only, and in a slot the rows in front of those that it still reads:
    # so a state can change in place.
    for run in tl.range(first, last):
        begin, end = tl.load(starts + run).to(tl.int64), tl.load(starts + run + 1).to(tl.int64)
        slot, target = tl.load(read + run).to(tl.int64), tl.load(written + run).to(tl.int64)
        for tap in tl.static_range(TAPS):
            at = end + tap - TAPS
            value = _input(x, gate, states, at, begin, slot, columns, channels, row_stride, TAPS, HAS_GATES)
            tl.store(states + (target * TAPS + tap) * channels + columns, value, mask=columns < channels)


@triton.jit
def softplus(x):
    power = tl.exp(x)
    one_more = 1.0 + power
    # What 1 + power has lost of a small power comes back by the quotient.
    log = tl.where(one_more == 1.0, power, tl.log(one_more) * (power / (one_more - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def delta_gates(a, b, rates, bias, decay, beta, heads, row_stride, WIDTH: tl.constexpr):
    """Compute the logarithms of decays, rates · softplus(a + bias), and sigmoid(b). Grid: (T, heads / WIDTH).

    Args:
        a, b: [T, heads], rows ``row_stride`` elements apart; rates, bias: [heads] float32.
        decay, beta: [T, heads] float32.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_head = columns < heads
    steps = tl.load(a + row * row_stride + columns, mask=is_head, other=0.0).to(tl.float32)
    steps = softplus(steps + tl.load(bias + columns, mask=is_head, other=0.0))
    tl.store(decay + row * heads + columns, tl.load(rates + columns, mask=is_head, other=0.0) * steps, mask=is_head)
    amounts = tl.load(b + row * row_stride + columns, mask=is_head, other=0.0).to(tl.float32)
    tl.store(beta + row * heads + columns, tl.sigmoid(amounts), mask=is_head)


@triton.jit
def gated_delta(
    query,
    key,
    value,
    decay,
    beta,
    states,
    out,
    read,
    written,
    starts,
    chains,
    key_stride,
    value_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Apply the gated delta rule, as ``StateOps.gated_delta`` states it. Grid: (chains, HEADS, VALUE / VALUES).

    A program has one warp, so that sums over a key's elements need no exchange between warps for each token. The inputs
    of the next tokens are on their way meanwhile: a token alone would take as long as they do.

    Args:
        query, key: [T, HEADS / GROUP, KEY], rows ``key_stride`` elements apart; value: [T, HEADS, VALUE].
        decay: [T, HEADS], or [T, HEADS, KEY] if BY_CHANNEL; beta: [T, HEADS]; float32.
        states: [slots, HEADS, KEY, VALUE] float32; out: [T, HEADS, VALUE].
    """
    chain, head = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, PADDED_KEY), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    is_element = is_key[:, None] & is_value[None, :]
    place = states + head * (KEY * VALUE) + keys[:, None] * VALUE + values[None, :]
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    slot = tl.load(read + first).to(tl.int64)
    state = tl.load(place + slot * (HEADS * KEY * VALUE), mask=is_element & (slot >= 0), other=0.0)
    of_key = (head // GROUP) * KEY + keys
    for run in tl.range(first, last):
        begin, end = tl.load(starts + run).to(tl.int64), tl.load(starts + run + 1).to(tl.int64)
        for index in tl.range(0, end - begin, num_stages=3):
            row = begin + index
            k = tl.load(key + row * key_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
            q = tl.load(query + row * key_stride + of_key, mask=is_key, other=0.0).to(tl.float32)
            k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
            q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
            if BY_CHANNEL:
                logs = tl.load(decay + (row * HEADS + head) * KEY + keys, mask=is_key, other=0.0)
                state *= tl.exp(logs)[:, None]
            else:
                state *= tl.exp(tl.load(decay + row * HEADS + head))
            v = tl.load(value + row * value_stride + head * VALUE + values, mask=is_value, other=0.0).to(tl.float32)
            change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * HEADS + head)
            state += k[:, None] * change[None, :]
            result = tl.sum(state * q[:, None], 0)
            tl.store(out + (row * HEADS + head) * VALUE + values, result, mask=is_value)
        target = tl.load(written + run).to(tl.int64)
        tl.store(place + target * (HEADS * KEY * VALUE), state, mask=is_element)


@triton.jit
def mamba2(
    x,
    b,
    c,
    dt,
    a,
    d,
    dt_bias,
    states,
    out,
    read,
    written,
    starts,
    chains,
    row_stride,
    dt_stride,
    least_dt,
    most_dt,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Apply Mamba-2, as ``StateOps.mamba2`` states it. Grid: (chains, HEADS, HEAD / ROWS), of one warp each.

    Args:
        x: [T, HEADS, HEAD]; b, c: [T, HEADS / GROUP, STATE]; rows ``row_stride`` elements apart.
        dt: [T, HEADS], rows ``dt_stride`` elements apart; a, d, dt_bias: [HEADS] float32.
        states: [slots, HEADS, HEAD, STATE] float32; out: [T, HEADS, HEAD].
    """
    chain, head = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED_STATE)
    is_row, is_column = rows < HEAD, columns < STATE
    is_element = is_row[:, None] & is_column[None, :]
    place = states + head * (HEAD * STATE) + rows[:, None] * STATE + columns[None, :]
    rate, direct, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    slot = tl.load(read + first).to(tl.int64)
    state = tl.load(place + slot * (HEADS * HEAD * STATE), mask=is_element & (slot >= 0), other=0.0)
    of_group = (head // GROUP) * STATE + columns
    for run in tl.range(first, last):
        begin, end = tl.load(starts + run).to(tl.int64), tl.load(starts + run + 1).to(tl.int64)
        for index in tl.range(0, end - begin, num_stages=3):
            row = begin + index
            time = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + bias)
            time = tl.minimum(tl.maximum(time, least_dt), most_dt)
            inputs = tl.load(x + row * row_stride + head * HEAD + rows, mask=is_row, other=0.0).to(tl.float32)
            into = tl.load(b + row * row_stride + of_group, mask=is_column, other=0.0).to(tl.float32)
            from_state = tl.load(c + row * row_stride + of_group, mask=is_column, other=0.0).to(tl.float32)
            state = state * tl.exp(time * rate) + (inputs * time)[:, None] * into[None, :]
            result = tl.sum(state * from_state[None, :], 1) + direct * inputs
            tl.store(out + (row * HEADS + head) * HEAD + rows, result, mask=is_row)
        target = tl.load(written + run).to(tl.int64)
        tl.store(place + target * (HEADS * HEAD * STATE), state, mask=is_element)


@triton.jit
def gated_norm(
    x,
    gate,
    weight,
    out,
    groups,
    size,
    gate_stride,
    weight_stride,
    eps,
    NORM_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one group of a row of ``StateOps.gated_norm``. Grid: (T, groups). WIDTH: a power of two of at least size.

    Args:
        x, out: [T, groups, size]; gate: the same, rows ``gate_stride`` elements apart.
        weight: [groups, size], groups ``weight_stride`` elements apart; 0: all have the same.
    """
    row, group, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    is_column, at = columns < size, (row * groups + group) * size + columns
    wide = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
    factor = tl.load(gate + row * gate_stride + group * size + columns, mask=is_column, other=0.0).to(tl.float32)
    factor *= tl.sigmoid(factor)
    inner = wide if NORM_FIRST else wide * factor
    own = tl.load(weight + group * weight_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    result = inner * tl.rsqrt(tl.sum(inner * inner, 0) / size + eps) * own
    if NORM_FIRST:
        result *= factor
    tl.store(out + at, result, mask=is_column)
