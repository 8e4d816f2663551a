# mypy: ignore-errors
"""Triton kernels of a forward between its products: norms, rotary embeddings, rows of latents,
gated activations, and the routing, order and sums of experts.

Each computes in float32 and rounds to the tensors' type wherever torch's operators, one by one,
would: a result differs only by the order of a norm's sum, and by exp.
"""

import triton
import triton.language as tl

from slipstream_core.kernels.card.dependent_launch import begin_early

SILU, GELU, TANH_GELU, NEW_GELU, XIELU = (tl.constexpr(kind) for kind in range(5))
LOGITS, SOFTMAX, SIGMOID = (tl.constexpr(kind) for kind in range(3))
OF_SCORES, OF_SUM, OF_SOFTMAX = (tl.constexpr(kind) for kind in range(3))


@triton.jit(do_not_specialize=["heads"])
def norm(
    output,  # [T, heads, N]: the norm, or the sum without NORM
    total,  # [T, heads, N], with ADD and NORM: the sum
    x,  # [T, heads, N]
    more,  # [T, heads, N], with ADD
    before,  # [N], with BEFORE: the weight of a norm of x before the sum
    weight,  # [N], with WEIGHT; [heads, N], with OWN
    bias,  # [N], with BIAS
    x_token,
    x_head,
    more_token,
    more_head,
    heads,
    scale,  # of x before the sum, with SCALE
    epsilon,
    N: tl.constexpr,
    PAD: tl.constexpr,  # the next power of two
    BY_HEAD: tl.constexpr,  # else there is one
    BEFORE: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    CENTER: tl.constexpr,  # the mean is taken away
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,  # to the tensors' type before the weight is applied
    OFFSET: tl.constexpr,  # the factor is 1 + weight
    OWN: tl.constexpr,  # each head has a weight
    EARLY: tl.constexpr = False,
):
    """Sums, and norms over the last dimension before and behind them. Grid: (T * heads,)."""
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if BY_HEAD:  # in 32 bits, as a card has no division of 64
        token = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        x += token * x_token + head * x_head
        if ADD:
            more += token * more_token + head * more_head
        if OWN:
            weight += head * N
    else:
        x += row * x_token
        if ADD:
            more += row * more_token
    places = tl.arange(0, PAD)
    there = places < N
    kind = output.dtype.element_ty
    value = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    if BEFORE:
        value = _normed(
            value, before, None, places, there, kind, epsilon, N, CENTER, True, False, ROUNDS,
            OFFSET,
        )  # fmt: skip
    if SCALE:
        value = rounded(value * scale, kind)
    if ADD:
        added = tl.load(more + places, mask=there, other=0.0).to(tl.float32)
        value = rounded(value + added, kind)
        if NORM:
            tl.store(total + row * N + places, value.to(kind), mask=there)
    if NORM:
        value = _normed(
            value, weight, bias, places, there, kind, epsilon, N, CENTER, WEIGHT, BIAS, ROUNDS,
            OFFSET,
        )  # fmt: skip
    tl.store(output + row * N + places, value.to(kind), mask=there)


@triton.jit
def norm_two(
    output,  # [T, N]
    other_output,  # [T, OTHER_N]
    x,  # [T, N]
    other,  # [T, OTHER_N]
    weight,  # [N]
    other_weight,  # [OTHER_N]
    x_token,
    other_token,
    epsilon,
    N: tl.constexpr,
    PAD: tl.constexpr,  # the next power of two
    OTHER_N: tl.constexpr,
    OTHER_PAD: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Norms of two tensors over their last dimension. Grid: (T, 2)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _norm_row(output + token * N, x + token * x_token, weight, epsilon, N, PAD, ROUNDS, OFFSET)
    else:
        _norm_row(
            other_output + token * OTHER_N, other + token * other_token, other_weight, epsilon,
            OTHER_N, OTHER_PAD, ROUNDS, OFFSET,
        )  # fmt: skip


@triton.jit
def _norm_row(
    output,
    x,
    weight,
    epsilon,
    N: tl.constexpr,
    PAD: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    places = tl.arange(0, PAD)
    there = places < N
    kind = output.dtype.element_ty
    value = tl.load(x + places, mask=there, other=0.0).to(tl.float32)
    value = _normed(
        value, weight, None, places, there, kind, epsilon, N, False, True, False, ROUNDS, OFFSET
    )
    tl.store(output + places, value.to(kind), mask=there)


@triton.jit
def _normed(
    value,  # [PAD], 0 beyond N
    weight,
    bias,
    places,
    there,
    kind,
    epsilon,
    N: tl.constexpr,
    CENTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """A row's norm, rounded."""
    if CENTER:
        value = tl.where(there, value - tl.sum(value, 0) / N, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / N + epsilon)
    if WEIGHT:
        value = weighed(value, weight + places, there, kind, ROUNDS, OFFSET)
    if BIAS:
        value += tl.load(bias + places, mask=there, other=0.0).to(tl.float32)
    return rounded(value, kind)


@triton.jit
def weighed(normed, weight, there, kind, ROUNDS: tl.constexpr, OFFSET: tl.constexpr):
    """A norm times its weight, not rounded behind it."""
    if ROUNDS:
        normed = rounded(normed, kind)
    factor = tl.load(weight, mask=there, other=0.0).to(tl.float32)
    if OFFSET:
        factor = factor + 1.0
    return normed * factor


@triton.jit
def rounded(value, kind):
    """Round to this type; the result is float32."""
    return value.to(kind).to(tl.float32)


@triton.jit
def activate(
    output,  # [T, N]
    x,  # [T, N]
    up,  # [T, N], with MUL
    positive,  # [1], with XIELU; so are negative, beta and limit
    negative,
    beta,
    limit,
    x_token,
    up_token,
    N: tl.constexpr,
    KIND: tl.constexpr,
    MUL: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """activation(x), with MUL times up. Grid: (T, blocks of N)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < N
    kind = output.dtype.element_ty
    value = tl.load(x + token * x_token + places, mask=there, other=0.0).to(tl.float32)
    if KIND == XIELU:
        value = _xielu(value, positive, negative, beta, limit, kind)
    else:
        value = activated(value, KIND, kind)
    if MUL:
        factor = tl.load(up + token * up_token + places, mask=there, other=0.0).to(tl.float32)
        value = rounded(value, kind) * factor
    tl.store(output + token * N + places, value.to(kind), mask=there)


@triton.jit
def activated(value, KIND: tl.constexpr, kind):
    """Any activation but xIELU, not rounded."""
    if KIND == SILU:
        value = value / (1.0 + tl.exp(-value))
    elif KIND == GELU:
        value = value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    elif KIND == TANH_GELU:
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh(inner)) / 2
    else:
        value = _new_gelu(value, kind)
    return value


@triton.jit
def _new_gelu(value, kind):
    """gelu by its approximation with tanh, as transformers' "gelu_new" rounds."""
    cube = rounded(rounded(value * value, kind) * value, kind)
    inner = rounded(value + rounded(0.044715 * cube, kind), kind)
    inner = rounded(0.7978845608028654 * inner, kind)
    tanh = rounded(1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner)), kind)
    return rounded(0.5 * value, kind) * rounded(1.0 + tanh, kind)


@triton.jit
def _xielu(value, positive, negative, beta, limit, kind):
    """xIELU (Huang and Schlag 2024, arXiv 2411.13010), as transformers rounds."""
    slope = tl.load(beta).to(tl.float32)
    above = rounded(_softplus(tl.load(positive).to(tl.float32)), kind)
    below = rounded(_softplus(tl.load(negative).to(tl.float32)), kind)
    below = rounded(slope + below, kind)
    above = rounded(rounded(above * value, kind) * value, kind)
    lower = tl.minimum(value, tl.load(limit).to(tl.float32))
    lower = rounded(rounded(_expm1(lower), kind) - value, kind)
    lower = rounded(lower * below, kind)
    return tl.where(value > 0, above, lower) + rounded(slope * value, kind)


@triton.jit
def _softplus(value):
    """log(1 + exp(value)), as torch computes it up to 20."""
    power = tl.exp(value)
    small = power * (1.0 - power * (0.5 - power / 3.0))  # where 1 + power keeps few bits of it
    found = tl.where(power < 0.01, small, tl.log(1.0 + power))
    return tl.where(value > 20.0, value, found)


@triton.jit
def _expm1(value):
    """exp(value) - 1, by a series where the difference would keep few bits."""
    series = 1.0 + value / 5.0 * (1.0 + value / 6.0)
    series = 1.0 + value / 2.0 * (1.0 + value / 3.0 * (1.0 + value / 4.0 * series))
    return tl.where(tl.abs(value) < 0.25, value * series, tl.exp(value) - 1.0)


@triton.jit
def clamped_gate(
    output,  # [R, N]
    rows,  # [R, 2 * N], pairs of what is activated and what it is multiplied by
    bias,  # [experts, 2 * N]
    experts,  # [R] int64
    limit,
    alpha,
    row_stride,
    bias_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """GPT-OSS's gate, as transformers rounds. Grid: (R, blocks of N)."""
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < N
    kind = output.dtype.element_ty
    at = rows + row * row_stride + 2 * places
    bias += tl.load(experts + row) * bias_stride + 2 * places
    gate, up = _biased(at, bias, there, kind), _biased(at + 1, bias + 1, there, kind)
    gate = tl.where(gate > limit, limit, gate)  # what is no number stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    share = rounded(1.0 / (1.0 + tl.exp(-rounded(gate * alpha, kind))), kind)
    value = rounded(up + 1.0, kind) * rounded(gate * share, kind)
    tl.store(output + row * N + places, value.to(kind), mask=there)


@triton.jit
def _biased(value, bias, there, kind):
    total = tl.load(value, mask=there, other=0.0).to(tl.float32)
    total += tl.load(bias, mask=there, other=0.0).to(tl.float32)
    return rounded(total, kind)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["kv_slots"])
def rotate(
    query_output,  # [T, QUERY_HEADS, DIM]
    key_output,  # [slots, HEADS - QUERY_HEADS, DIM] of the paged cache, if there are keys
    query,  # [T, QUERY_HEADS, DIM]
    key,
    query_weight,  # [DIM], with NORM or BEHIND; [QUERY_HEADS, DIM], with OWN
    key_weight,
    cosines,  # [T, 2 * HALF], or half as many by pair
    sines,
    query_token,
    query_head,
    key_token,
    key_head,
    cosine_token,
    sine_token,
    num_tokens,
    value,  # [T, HEADS - QUERY_HEADS, VALUE_DIM], if there are keys
    values,  # [slots, HEADS - QUERY_HEADS, VALUE_DIM]
    kv_slots,  # [T] int64
    value_token,
    value_head,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,  # the next power of two
    epsilon,
    HEADS: tl.constexpr,  # of queries and keys
    QUERY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs that turn
    PAD: tl.constexpr,  # of HALF, the next power of two
    REST_PAD: tl.constexpr,  # of the dimensions that do not turn
    INTERLEAVED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,  # neighbours are written as the two halves
    NORM: tl.constexpr,
    BEHIND: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,  # with NORM, a head's mean is taken away
    OWN: tl.constexpr,  # each head has a weight
    ROWS: tl.constexpr,  # heads at once
    EARLY: tl.constexpr = False,
):
    """Turns the pairs of heads, and norms them before, with NORM, or behind it, with BEHIND.

    Keys and values are written to their slots of the paged cache.
    Grid: (blocks of T * QUERY_HEADS heads, then of the keys', then of the values',).
    """
    begin_early(EARLY)
    query_blocks = tl.cdiv(num_tokens * QUERY_HEADS, ROWS)
    key_blocks = tl.cdiv(num_tokens * (HEADS - QUERY_HEADS), ROWS)
    block = tl.program_id(0)
    if block < query_blocks:
        _rotate_block(
            query_output, query, query_weight, cosines, sines, None, block, num_tokens,
            query_token, query_head, cosine_token, sine_token, epsilon,
            QUERY_HEADS, DIM, HALF, PAD, REST_PAD,
            INTERLEAVED, BY_PAIR, WIDE, PARTS, NORM, BEHIND, ROUNDS, OFFSET, CENTER, OWN, False,
            ROWS,
        )  # fmt: skip
    elif HEADS > QUERY_HEADS:
        block -= query_blocks
        if block < key_blocks:
            _rotate_block(
                key_output, key, key_weight, cosines, sines, kv_slots, block, num_tokens,
                key_token, key_head, cosine_token, sine_token, epsilon,
                HEADS - QUERY_HEADS, DIM, HALF, PAD, REST_PAD,
                INTERLEAVED, BY_PAIR, WIDE, PARTS, NORM, BEHIND, ROUNDS, OFFSET, CENTER, OWN, True,
                ROWS,
            )  # fmt: skip
        else:
            _store_block(
                values, value, kv_slots, block - key_blocks, num_tokens, value_token, value_head,
                HEADS - QUERY_HEADS, VALUE_DIM, VALUE_PAD, ROWS,
            )  # fmt: skip


@triton.jit
def _store_block(
    values,  # [slots, HEADS, DIM]
    value,
    kv_slots,
    block,
    num_tokens,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = (block.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token = rows // HEADS
    head = rows % HEADS
    dims = tl.arange(0, PAD)[None, :]
    there = (token < num_tokens) & (dims < DIM)
    moved = tl.load(value + token * value_token + head * value_head + dims, mask=there, other=0.0)
    slots = tl.load(kv_slots + token, mask=token < num_tokens, other=0)
    tl.store(values + (slots * HEADS + head) * DIM + dims, moved, mask=there)


@triton.jit
def _rotate_block(
    output,  # [T, HEADS, DIM]; [slots, HEADS, DIM], with STORE
    x,
    weight,
    cosines,
    sines,
    kv_slots,  # [T] int64, with STORE
    block,
    num_tokens,
    x_token,
    x_head,
    cosine_token,
    sine_token,
    epsilon,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    BEHIND: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
    OWN: tl.constexpr,
    STORE: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = (block.to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token = rows // HEADS
    place = token
    if STORE:
        place = tl.load(kv_slots + token, mask=token < num_tokens, other=0)
    head = rows % HEADS
    if OWN:
        weight += head * DIM
    _rotate_heads(
        output + (place * HEADS + head) * DIM, x + token * x_token + head * x_head, weight,
        cosines + token * cosine_token, sines + token * sine_token, token < num_tokens, epsilon,
        DIM, HALF, PAD, REST_PAD, INTERLEAVED, BY_PAIR, WIDE, PARTS, NORM, BEHIND, ROUNDS, OFFSET,
        CENTER,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def latent_rows(
    queries,  # [T, HEADS, RANK + 2 * HALF], written from RANK on
    rows,  # [slots, RANK + 2 * HALF], of the paged cache
    query,  # [T, HEADS, 2 * HALF]
    key,  # [T, 2 * HALF]
    latent,  # [T, RANK]
    weight,  # [RANK]
    cosines,  # [T, 2 * HALF], or half as many by pair
    sines,
    kv_slots,  # [T] int64
    query_token,
    query_head,
    key_token,
    latent_token,
    cosine_token,
    sine_token,
    epsilon,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,  # the next power of two
    HALF: tl.constexpr,
    PAD: tl.constexpr,  # of HALF, the next power of two
    INTERLEAVED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Turns queries and keys, and norms latents. Grid: (T * (HEADS + 1),)."""
    begin_early(EARLY)
    program = tl.program_id(0).to(tl.int64)
    token = program // (HEADS + 1)
    head = program % (HEADS + 1)
    one = tl.zeros([1, 1], tl.int64)
    cosines += token * cosine_token + one
    sines += token * sine_token + one
    if head < HEADS:
        _rotate_heads(
            queries + (token * HEADS + head) * (RANK + 2 * HALF) + RANK + one,
            query + token * query_token + head * query_head + one,
            weight, cosines, sines, one == 0, epsilon, 2 * HALF, HALF, PAD, 1,
            INTERLEAVED, BY_PAIR, WIDE, PARTS, False, False, ROUNDS, OFFSET, False,
        )  # fmt: skip
    else:
        row = rows + tl.load(kv_slots + token) * (RANK + 2 * HALF)
        _rotate_heads(
            row + RANK + one, key + token * key_token + one,
            weight, cosines, sines, one == 0, epsilon, 2 * HALF, HALF, PAD, 1,
            INTERLEAVED, BY_PAIR, WIDE, PARTS, False, False, ROUNDS, OFFSET, False,
        )  # fmt: skip
        _norm_row(
            row, latent + token * latent_token, weight, epsilon, RANK, RANK_PAD, ROUNDS, OFFSET
        )


@triton.jit
def _rotate_heads(
    output,  # pointers to heads, [ROWS, 1]; so are x, cosines and sines
    x,
    weight,  # a pointer to [DIM], or [ROWS, 1] of them
    cosines,
    sines,
    real,  # [ROWS, 1]
    epsilon,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_PAIR: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,  # neighbours are written as the two halves
    NORM: tl.constexpr,
    BEHIND: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    CENTER: tl.constexpr,
):
    pairs = tl.arange(0, PAD)[None, :]
    there = real & (pairs < HALF)
    if INTERLEAVED:
        low = 2 * pairs
        high = low + 1
    else:
        low = pairs
        high = HALF + pairs
    first = tl.load(x + low, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + high, mask=there, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    if 2 * HALF < DIM:
        places = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        remains = real & (places < DIM)
        rest = tl.load(x + places, mask=remains, other=0.0).to(tl.float32)
    if NORM and CENTER:
        mean = tl.sum(first + second, 1)[:, None]
        if 2 * HALF < DIM:
            mean += tl.sum(rest, 1)[:, None]
        mean = mean / DIM
        first, second = tl.where(there, first - mean, 0.0), tl.where(there, second - mean, 0.0)
        if 2 * HALF < DIM:
            rest = tl.where(remains, rest - mean, 0.0)
    if NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        if 2 * HALF < DIM:
            squares += tl.sum(rest * rest, 1)[:, None]
        factor = tl.rsqrt(squares / DIM + epsilon)
        first = weighed(first * factor, weight + low, pairs < HALF, kind, ROUNDS, OFFSET)
        second = weighed(second * factor, weight + high, pairs < HALF, kind, ROUNDS, OFFSET)
        first, second = rounded(first, kind), rounded(second, kind)
        if 2 * HALF < DIM:
            rest = weighed(rest * factor, weight + places, places < DIM, kind, ROUNDS, OFFSET)
    at = pairs if BY_PAIR else low
    cosine = tl.load(cosines + at, mask=there, other=0.0).to(tl.float32)
    sine = tl.load(sines + at, mask=there, other=0.0).to(tl.float32)
    turned = _added(first * cosine, -second * sine, kind, WIDE)
    if not BY_PAIR:
        cosine = tl.load(cosines + high, mask=there, other=0.0).to(tl.float32)
        sine = tl.load(sines + high, mask=there, other=0.0).to(tl.float32)
    second = _added(second * cosine, first * sine, kind, WIDE)
    first = turned
    if PARTS:
        low = pairs
        high = HALF + pairs
    if BEHIND:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        if 2 * HALF < DIM:
            squares += tl.sum(rest * rest, 1)[:, None]
        factor = tl.rsqrt(squares / DIM + epsilon)
        first = weighed(first * factor, weight + low, pairs < HALF, kind, ROUNDS, OFFSET)
        second = weighed(second * factor, weight + high, pairs < HALF, kind, ROUNDS, OFFSET)
        if 2 * HALF < DIM:
            rest = weighed(rest * factor, weight + places, places < DIM, kind, ROUNDS, OFFSET)
    tl.store(output + low, first.to(kind), mask=there)
    tl.store(output + high, second.to(kind), mask=there)
    if 2 * HALF < DIM:
        tl.store(output + places, rest.to(kind), mask=remains)


@triton.jit
def _added(straight, crossed, kind, WIDE: tl.constexpr):
    """The sum of two products, rounded."""
    if not WIDE:
        straight, crossed = rounded(straight, kind), rounded(crossed, kind)
    return rounded(straight + crossed, kind)


@triton.jit
def route(
    weights,  # [T, CHOSEN]
    ids,  # [T, CHOSEN] int64
    logits,  # [T, EXPERTS]
    bias,  # [EXPERTS], with BIAS
    logits_token,
    scale,
    epsilon,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,  # the next power of two
    CHOSEN: tl.constexpr,
    CHOSEN_PAD: tl.constexpr,
    SCORES: tl.constexpr,
    WEIGHS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST: tl.constexpr,  # scores of a group that are summed to choose it by
    EARLY: tl.constexpr = False,
):
    """The experts of each token, best first, and their weights. Grid: (T,)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PAD)
    there = experts < EXPERTS
    value = tl.load(logits + token * logits_token + experts, mask=there, other=-float("inf"))
    value = value.to(tl.float32)
    if SCORES == SOFTMAX:
        value = tl.exp(value - tl.max(value, 0))
        value = value / tl.sum(value, 0)
    elif SCORES == SIGMOID:
        value = 1.0 / (1.0 + tl.exp(-value))
    by = value
    if BIAS:
        by = by + tl.load(bias + experts, mask=there, other=0.0).to(tl.float32)
    by = tl.where(there, by, -float("inf"))
    if GROUPS > 1:
        by = _of_best_groups(by, EXPERTS, PAD, GROUPS, GROUPS_PAD, CHOSEN_GROUPS, BEST)
    places = tl.arange(0, CHOSEN_PAD)
    found = tl.zeros([CHOSEN_PAD], tl.float32)
    which = tl.zeros([CHOSEN_PAD], tl.int32)
    for place in tl.static_range(CHOSEN):
        best = tl.minimum(tl.argmax(by, 0), EXPERTS - 1)  # in bounds whatever NaN there is
        found = tl.where(places == place, tl.sum(tl.where(experts == best, value, 0.0), 0), found)
        which = tl.where(places == place, best, which)
        by = tl.where(experts == best, -float("inf"), by)
    real = places < CHOSEN
    if WEIGHS == OF_SUM:
        found = found / (tl.sum(tl.where(real, found, 0.0), 0) + epsilon)
    elif WEIGHS == OF_SOFTMAX:
        top = tl.max(tl.where(real, found, -float("inf")), 0)
        found = tl.where(real, tl.exp(found - top), 0.0)
        found = found / tl.sum(found, 0)
    at = token * CHOSEN + places
    tl.store(weights + at, (found * scale).to(weights.dtype.element_ty), mask=real)
    tl.store(ids + at, which.to(tl.int64), mask=real)


@triton.jit
def route_by_margin(
    weights,  # [T, 2]
    ids,  # [T, 2] int64
    logits,  # [T, EXPERTS]
    logits_token,
    margin,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,  # the next power of two
    EARLY: tl.constexpr = False,
):
    """The two best experts, each weighed among those left that are close to it. Grid: (T,)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, PAD)
    there = experts < EXPERTS
    value = tl.load(logits + token * logits_token + experts, mask=there, other=-float("inf"))
    value = value.to(tl.float32)
    kind = weights.dtype.element_ty
    left = value
    for place in tl.static_range(2):
        top = tl.max(left, 0)
        best = tl.minimum(tl.argmax(left, 0), EXPERTS - 1)  # in bounds whatever NaN there is
        distance = (top - value).to(kind).to(tl.float32)
        ratio = (distance / tl.maximum(tl.abs(value), top)).to(kind).to(tl.float32)
        close = tl.where(ratio > margin, -float("inf"), left)
        total = tl.sum(tl.where(there, tl.exp(close - top), 0.0), 0)
        tl.store(weights + token * 2 + place, (1.0 / total).to(kind))
        tl.store(ids + token * 2 + place, best.to(tl.int64))
        left = tl.where(experts == best, -float("inf"), left)


@triton.jit
def _of_best_groups(
    by,
    EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
):
    """Scores by which experts are chosen, -inf for those of groups that are not."""
    experts = tl.arange(0, PAD)
    group_of = experts // (EXPERTS // GROUPS)
    groups = tl.arange(0, GROUPS_PAD)
    sums = tl.full([GROUPS_PAD], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        mine = tl.where(group_of == group, by, -float("inf"))
        total = 0.0
        for _ in tl.static_range(BEST):
            total += tl.max(mine, 0)
            mine = tl.where(experts == tl.argmax(mine, 0), -float("inf"), mine)
        sums = tl.where(groups == group, total, sums)
    kept = experts < 0
    for _ in tl.static_range(CHOSEN_GROUPS):
        best = tl.argmax(sums, 0)
        kept = kept | (group_of == best)
        sums = tl.where(groups == best, -float("inf"), sums)
    return tl.where(kept, by, -float("inf"))


@triton.jit(do_not_specialize=["num_choices"])
def order_experts(
    ordered,  # [N] int64: the choices' experts, ascending
    places,  # [N] int64: the choice at each place of the order
    tokens,  # [N] int64: its token
    inverse,  # [N] int64: the place of each choice
    ends,  # [EXPERTS] int32: the places behind each expert's
    ids,  # [N] int64: N = T * CHOSEN
    num_choices,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """A stable sort of choices by expert; each program writes one expert's. Grid: (EXPERTS,)."""
    begin_early(EARLY)
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = 0
    for start in range(0, num_choices, BLOCK):
        choices = start + lanes
        which = tl.load(ids + choices, mask=choices < num_choices, other=1 << 30)
        before += tl.sum((which < expert).to(tl.int32), 0)
    for start in range(0, num_choices, BLOCK):
        choices = start + lanes
        mine = tl.load(ids + choices, mask=choices < num_choices, other=1 << 30) == expert
        counted = tl.cumsum(mine.to(tl.int32), 0)
        at = before + counted - 1
        tl.store(ordered + at, (choices * 0 + expert).to(tl.int64), mask=mine)
        tl.store(places + at, choices.to(tl.int64), mask=mine)
        tl.store(tokens + at, (choices // CHOSEN).to(tl.int64), mask=mine)
        tl.store(inverse + choices, at.to(tl.int64), mask=mine)
        before += tl.sum(mine.to(tl.int32), 0)
    tl.store(ends + expert, before)


@triton.jit
def combine_experts(
    output,  # [T, N]
    rows,  # [T * CHOSEN, N], in the experts' order
    weights,  # [T, CHOSEN]
    inverse,  # [T * CHOSEN] int64: the row of each choice
    ids,  # [T, CHOSEN] int64, with BIAS
    bias,  # [experts, N], with BIAS
    more,  # [T, N], with ADD
    row_stride,
    bias_stride,
    more_stride,
    N: tl.constexpr,
    CHOSEN: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,  # products are not rounded
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """The weighted sum of each token's rows. Grid: (T, blocks of N)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < N
    kind = output.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(CHOSEN):
        row = tl.load(inverse + token * CHOSEN + choice)
        value = tl.load(rows + row * row_stride + places, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(ids + token * CHOSEN + choice)
            added = tl.load(bias + expert * bias_stride + places, mask=there, other=0.0)
            value = (value + added.to(tl.float32)).to(kind).to(tl.float32)
        value = value * tl.load(weights + token * CHOSEN + choice).to(tl.float32)
        if not WIDE:
            value = value.to(kind).to(tl.float32)
        total += value
    result = total.to(kind)
    if ADD:
        added = tl.load(more + token * more_stride + places, mask=there, other=0.0)
        result = (result.to(tl.float32) + added.to(tl.float32)).to(kind)
    tl.store(output + token * N + places, result, mask=there)
