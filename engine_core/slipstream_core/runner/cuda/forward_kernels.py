# mypy: ignore-errors
"""Triton kernels of a forward between its products: norms, rotary embeddings, gated activations.

Each computes in float32 and rounds to the tensors' type wherever torch's operators, one by one,
would: a result differs only by the order of a norm's sum, and by exp.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    output,  # [T, HEADS, N]
    total,  # [T, HEADS, N], with ADD: x + more
    x,  # [T, HEADS, N]
    more,  # [T, HEADS, N], with ADD
    weight,  # [N]
    x_token,
    x_head,
    more_token,
    more_head,
    epsilon,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    PAD: tl.constexpr,  # the next power of two
    ADD: tl.constexpr,
    ROUNDS: tl.constexpr,  # to the tensors' type before the weight is applied
    OFFSET: tl.constexpr,  # the factor is 1 + weight
):
    """Norms over the last dimension. Grid: (T * HEADS,)."""
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    head = row % HEADS
    places = tl.arange(0, PAD)
    there = places < N
    value = tl.load(x + token * x_token + head * x_head + places, mask=there, other=0.0)
    value = value.to(tl.float32)
    if ADD:
        added = tl.load(
            more + token * more_token + head * more_head + places, mask=there, other=0.0
        )
        both = (value + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * N + places, both, mask=there)
        value = both.to(tl.float32)
    mean = tl.sum(value * value, 0) / N
    normed = value * tl.rsqrt(mean + epsilon)
    if ROUNDS:
        normed = normed.to(output.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + places, mask=there, other=0.0).to(tl.float32)
    if OFFSET:
        factor = factor + 1.0
    tl.store(output + row * N + places, (normed * factor).to(output.dtype.element_ty), mask=there)


@triton.jit
def silu_mul(
    output,  # [T, N]
    gate,  # [T, N]
    up,  # [T, N]
    gate_token,
    up_token,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up. Grid: (T, blocks of N)."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = places < N
    value = tl.load(gate + token * gate_token + places, mask=there, other=0.0).to(tl.float32)
    value = (value / (1.0 + tl.exp(-value))).to(output.dtype.element_ty).to(tl.float32)
    factor = tl.load(up + token * up_token + places, mask=there, other=0.0).to(tl.float32)
    tl.store(output + token * N + places, (value * factor).to(output.dtype.element_ty), mask=there)


@triton.jit
def rotate(
    output,  # [T, HEADS, 2 * HALF]
    x,  # [T, HEADS, 2 * HALF]
    cosines,  # [T, 2 * HALF]
    sines,  # [T, 2 * HALF]
    x_token,
    x_head,
    cosine_token,
    sine_token,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,  # of HALF, the next power of two
):
    """x * cos + (-x's second half, x's first half) * sin. Grid: (T * HEADS,)."""
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    places = tl.arange(0, PAD)
    there = places < HALF
    x += token * x_token + row % HEADS * x_head + places
    cosines += token * cosine_token + places
    sines += token * sine_token + places
    output += row * 2 * HALF + places
    first = tl.load(x, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=there, other=0.0).to(tl.float32)
    kind = output.dtype.element_ty
    straight = first * tl.load(cosines, mask=there, other=0.0).to(tl.float32)
    crossed = -second * tl.load(sines, mask=there, other=0.0).to(tl.float32)
    low = straight.to(kind).to(tl.float32) + crossed.to(kind).to(tl.float32)
    tl.store(output, low.to(kind), mask=there)
    straight = second * tl.load(cosines + HALF, mask=there, other=0.0).to(tl.float32)
    crossed = first * tl.load(sines + HALF, mask=there, other=0.0).to(tl.float32)
    high = straight.to(kind).to(tl.float32) + crossed.to(kind).to(tl.float32)
    tl.store(output + HALF, high.to(kind), mask=there)
