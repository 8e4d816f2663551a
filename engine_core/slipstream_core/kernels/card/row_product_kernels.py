# mypy: ignore-errors
"""Triton kernels of a matrix times one row, with the norm before it and the sum or gate behind it,
and of a few tokens' experts.

A step of one row reads every weight once and computes next to nothing, so it takes what its bytes
take. Each program has some of the matrix's rows and asks for their first columns before it waits
for the kernel that writes x (`dependent_launch`), so that memory is busy between kernels as well.
Which experts' weights are read is known only then.

Products are summed in float32 and rounded where torch's operators, one by one, would: a result
differs by the order of the sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream_core.kernels.card.dependent_launch import begin_early
from slipstream_core.kernels.card.forward_kernels import activated, rounded, weighed


@triton.jit
def row_product(
    output,  # [N]
    x,  # [K]
    weight,  # [N, K], or [2 * N, K] with GATE: what is activated above what it is multiplied by
    bias,  # [N], with BIAS
    more,  # [N], with ADD
    norm_weight,  # [K], with NORM
    normed,  # [K], with KEEP
    before,  # [K], with SUM
    total,  # [K], with SUM
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    PAD: tl.constexpr,  # of K, the next power of two
    SUM: tl.constexpr,  # x + before is what is normed and multiplied, and stored as `total`
    NORM: tl.constexpr,  # of x, before the product
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    KEEP: tl.constexpr,  # store the norm
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,  # an activation's number, or -1
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of which N is a multiple
    BLOCK_K: tl.constexpr,  # of which K is a multiple
):
    """activation(weight @ norm(x + before) + bias) + more. Grid: (N / BLOCK_N,)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    at = weight + rows.to(tl.int64)[:, None] * K + places[None, :]
    UPPER: tl.constexpr = N * K if GATE >= 0 else 0
    if EARLY:
        gdc_launch_dependents()
    # before the wait: weights need no result of the kernel before (decision 034)
    part = tl.load(at, eviction_policy="evict_first")
    upper = part
    if GATE >= 0:
        upper = tl.load(at + UPPER, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
    kind = output.dtype.element_ty
    factor = 1.0
    if NORM or SUM:
        whole = tl.arange(0, PAD)
        there = whole < K
        given = tl.load(x + whole, mask=there, other=0.0).to(tl.float32)
        is_first = (whole >= 0) & (tl.program_id(0) == 0)
        if SUM:
            given = rounded(given + tl.load(before + whole, mask=there, other=0.0), kind)
            tl.store(total + whole, given.to(kind), mask=there & is_first)
        if NORM:
            factor = tl.rsqrt(tl.sum(given * given, 0) / K + epsilon)
        if KEEP:
            kept = weighed(given * factor, norm_weight + whole, there, kind, ROUNDS, OFFSET)
            tl.store(normed + whole, kept.to(kind), mask=there & is_first)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    upper_sums = sums
    for start in range(0, K - BLOCK_K, BLOCK_K):
        next_part = tl.load(at + start + BLOCK_K, eviction_policy="evict_first")
        if GATE >= 0:
            next_upper = tl.load(at + UPPER + start + BLOCK_K, eviction_policy="evict_first")
        value = _columns(
            x, before, norm_weight, start + places, factor, kind, SUM, NORM, ROUNDS, OFFSET
        )
        sums += part.to(tl.float32) * value[None, :]
        part = next_part
        if GATE >= 0:
            upper_sums += upper.to(tl.float32) * value[None, :]
            upper = next_upper
    value = _columns(
        x, before, norm_weight, K - BLOCK_K + places, factor, kind, SUM, NORM, ROUNDS, OFFSET
    )
    sums += part.to(tl.float32) * value[None, :]
    result = _finished(tl.sum(sums, 1), bias, rows, kind, BIAS)
    if GATE >= 0:
        upper_sums += upper.to(tl.float32) * value[None, :]
        upper_result = _finished(tl.sum(upper_sums, 1), bias, N + rows, kind, BIAS)
        result = rounded(activated(result, GATE, kind), kind) * upper_result
    if ADD:
        result = rounded(result, kind) + tl.load(more + rows).to(tl.float32)
    tl.store(output + rows, result.to(kind))


@triton.jit
def _columns(
    x,
    before,
    norm_weight,
    places,
    factor,
    kind,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Some of x, normed."""
    value = tl.load(x + places).to(tl.float32)
    if SUM:
        value = rounded(value + tl.load(before + places).to(tl.float32), kind)
    if NORM:
        value = weighed(value * factor, norm_weight + places, places >= 0, kind, ROUNDS, OFFSET)
        value = rounded(value, kind)
    return value


@triton.jit
def _finished(total, bias, rows, kind, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias + rows).to(tl.float32)
    return rounded(total, kind)


@triton.jit
def expert_gates(
    output,  # [T * CHOSEN, N]
    x,  # [T, K]
    ids,  # [T * CHOSEN] int64
    weight,  # [experts, 2 * N, K]: what is activated above what it is multiplied by
    N: tl.constexpr,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATE: tl.constexpr,  # an activation's number
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of which N is a multiple
    BLOCK_K: tl.constexpr,  # of which K is a multiple
):
    """activation(upper half of weight[id] @ x) * (lower half @ x). Grid: (N / BLOCK_N, choices)."""
    begin_early(EARLY)
    choice = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    x += choice // CHOSEN * K
    upper = tl.load(ids + choice) * 2 * N
    at = weight + (upper + rows)[:, None] * K + places[None, :]
    kind = output.dtype.element_ty
    gates = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    values = gates
    gate = tl.load(at, eviction_policy="evict_first")
    up = tl.load(at + N * K, eviction_policy="evict_first")
    for start in range(0, K - BLOCK_K, BLOCK_K):
        next_gate = tl.load(at + start + BLOCK_K, eviction_policy="evict_first")
        next_up = tl.load(at + N * K + start + BLOCK_K, eviction_policy="evict_first")
        value = tl.load(x + start + places).to(tl.float32)
        gates += gate.to(tl.float32) * value[None, :]
        values += up.to(tl.float32) * value[None, :]
        gate, up = next_gate, next_up
    value = tl.load(x + K - BLOCK_K + places).to(tl.float32)
    gates += gate.to(tl.float32) * value[None, :]
    values += up.to(tl.float32) * value[None, :]
    result = rounded(activated(rounded(tl.sum(gates, 1), kind), GATE, kind), kind)
    result *= rounded(tl.sum(values, 1), kind)
    tl.store(output + choice * N + rows, result.to(kind))


@triton.jit
def expert_sums(
    output,  # [T, N]
    x,  # [T * CHOSEN, K]
    weights,  # [T, CHOSEN]
    ids,  # [T, CHOSEN] int64
    weight,  # [experts, N, K]
    more,  # [T, N], with ADD
    N: tl.constexpr,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    PAD: tl.constexpr,  # of CHOSEN, the next power of two
    ADD: tl.constexpr,
    WIDE: tl.constexpr,  # products are not rounded
    EARLY: tl.constexpr,
    BLOCK_K: tl.constexpr,  # of which K is a multiple
):
    """The sum of each token's weight[id] @ x, weighed, plus more. Grid: (N, T)."""
    begin_early(EARLY)
    row, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    choices = tl.arange(0, PAD)
    there = choices < CHOSEN
    places = tl.arange(0, BLOCK_K)
    experts = tl.load(ids + token * CHOSEN + choices, mask=there, other=0)
    at = weight + (experts * N + row)[:, None] * K + places[None, :]
    x += (token * CHOSEN + choices)[:, None] * K + places[None, :]
    mask = there[:, None] & (places >= 0)[None, :]
    kind = output.dtype.element_ty
    sums = tl.zeros([PAD, BLOCK_K], tl.float32)
    part = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    for start in range(0, K - BLOCK_K, BLOCK_K):
        next_part = tl.load(
            at + start + BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        sums += part.to(tl.float32) * tl.load(x + start, mask=mask, other=0.0).to(tl.float32)
        part = next_part
    sums += part.to(tl.float32) * tl.load(x + K - BLOCK_K, mask=mask, other=0.0).to(tl.float32)
    values = rounded(tl.sum(sums, 1), kind)
    factors = tl.load(weights + token * CHOSEN + choices, mask=there, other=0.0)
    values *= factors.to(tl.float32)
    if not WIDE:
        values = rounded(values, kind)
    result = rounded(tl.sum(values, 0), kind)
    if ADD:
        result += tl.load(more + token * N + row).to(tl.float32)
    tl.store(output + token * N + row, result.to(kind))
