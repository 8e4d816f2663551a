# mypy: ignore-errors
"""Triton kernels of a matrix times one row, with the norm before it and the sum or gate behind it.

A step of one row reads every weight once and computes next to nothing, so it takes what its bytes
take. Each program has some of the matrix's rows and asks for their first columns before it waits
for the kernel that writes x (`dependent_launch`), so that memory is busy between kernels as well.

Products are summed in float32 and rounded where torch's operators, one by one, would: a result
differs by the order of the sum.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slipstream_core.runner.cuda.forward_kernels import activated, rounded, weighed


@triton.jit
def row_product(
    output,  # [N]
    x,  # [K]
    weight,  # [N, K], or [2 * N, K] with GATE: what is activated above what it is multiplied by
    bias,  # [N], with BIAS
    more,  # [N], with ADD
    norm_weight,  # [K], with NORM
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    PAD: tl.constexpr,  # of K, the next power of two
    NORM: tl.constexpr,  # of x, before the product
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,  # an activation's number, or -1
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of which N is a multiple
    BLOCK_K: tl.constexpr,  # of which K is a multiple
):
    """activation(weight @ norm(x) + bias) + more. Grid: (N / BLOCK_N,)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K)
    at = weight + rows.to(tl.int64)[:, None] * K + places[None, :]
    UPPER: tl.constexpr = N * K if GATE >= 0 else 0
    if EARLY:
        gdc_launch_dependents()
    part = tl.load(at, eviction_policy="evict_first")
    if GATE >= 0:
        upper = tl.load(at + UPPER, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
    kind = output.dtype.element_ty
    factor = 1.0
    if NORM:
        whole = tl.arange(0, PAD)
        given = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(given * given, 0) / K + epsilon)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    upper_total = total
    for start in range(0, K - BLOCK_K, BLOCK_K):
        next_part = tl.load(at + start + BLOCK_K, eviction_policy="evict_first")
        if GATE >= 0:
            next_upper = tl.load(at + UPPER + start + BLOCK_K, eviction_policy="evict_first")
        value = _columns(x, norm_weight, start + places, factor, kind, NORM, ROUNDS, OFFSET)
        total += part.to(tl.float32) * value[None, :]
        part = next_part
        if GATE >= 0:
            upper_total += upper.to(tl.float32) * value[None, :]
            upper = next_upper
    value = _columns(x, norm_weight, K - BLOCK_K + places, factor, kind, NORM, ROUNDS, OFFSET)
    total += part.to(tl.float32) * value[None, :]
    result = _finished(tl.sum(total, 1), bias, rows, kind, BIAS)
    if GATE >= 0:
        upper_total += upper.to(tl.float32) * value[None, :]
        upper_result = _finished(tl.sum(upper_total, 1), bias, N + rows, kind, BIAS)
        result = rounded(activated(result, GATE, kind), kind) * upper_result
    if ADD:
        result = rounded(result, kind) + tl.load(more + rows).to(tl.float32)
    tl.store(output + rows, result.to(kind))


@triton.jit
def _columns(
    x,
    norm_weight,
    places,
    factor,
    kind,
    NORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Some of x, normed."""
    value = tl.load(x + places).to(tl.float32)
    if NORM:
        value = weighed(value * factor, norm_weight + places, places >= 0, kind, ROUNDS, OFFSET)
        value = rounded(value, kind)
    return value


@triton.jit
def _finished(total, bias, rows, kind, BIAS: tl.constexpr):
    if BIAS:
        total += tl.load(bias + rows).to(tl.float32)
    return rounded(total, kind)
