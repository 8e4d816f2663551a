# mypy: ignore-errors
"""A Triton kernel that draws a token from a row's whole kept set, one program per row.

The noise is that of `noise.py`, bit for bit up to the conversion to float. The truncated draw is
that of `top_k_top_p._draw_by_rejection`, in the same rounds with the same streams.

- A row that is not wanted costs one load; which rows are wanted is known only on the card.
- A rejected token raises the floor of the tokens that may still be drawn, and the most likely token
  is never rejected, so a row's loop ends whatever its logits are.
- Of equally good tokens the lowest id is drawn.
"""

import triton
import triton.language as tl

BLOCK = 4096  # logits at a time
NUM_WARPS = 8


@triton.jit
def _mixed(bits):
    """MurmurHash3's 32-bit finaliser (Austin Appleby, public domain), of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _unmixed(bits):
    """The inverse of `_mixed`."""
    bits = (bits ^ (bits >> 16)) * 0x7ED1B41D
    bits = (bits ^ (bits >> 13) ^ (bits >> 26)) * 0xA5CB9243
    return bits ^ (bits >> 16)


@triton.jit
def _noise(ids, key_0, key_1):
    """Exp(1) noise of token ids, as in `noise.exponential`."""
    bits = _mixed(ids.to(tl.uint32) ^ key_0)
    bits = _mixed(bits + key_1) & 0x7FFFFFFF
    share = (bits.to(tl.int32).to(tl.float32) + 0.5) * 0.0000000004656612873077393  # 2**-31
    share = tl.minimum(share, 0.999999940395355224609375)  # 1 - 2**-24: the noise is finite
    # log(1 - share) loses all precision where the share is small, and small noise decides
    small = share * (1.0 + share * (0.5 + share * (0.3333333333333333 + share * 0.25)))
    return tl.where(share < 0.015625, small, -tl.log(1.0 - share))


@triton.jit(
    do_not_specialize_on_alignment=[
        *("token_ids", "wanted", "keys", "log_totals", "mass_limits", "top_ks", "leasts")
    ],
)
def redraw(
    scaled,  # [S, vocab] float32
    token_ids,  # [S] int64, written for wanted rows only
    wanted,  # [S] int32
    keys,  # [S] int32: the first key of each row, for stream 0
    log_totals,  # [S] float32
    mass_limits,  # [S] float32: a token is kept if the mass of likelier ones is less
    top_ks,  # [S] int32: ... and they are fewer; 0 is no bound
    leasts,  # [S] float32: the least logit of a kept token
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Grid: (rows,)."""
    row = tl.program_id(0)
    logits = scaled + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)
    key = _unmixed(tl.load(keys + row).to(tl.uint32, bitcast=True))  # before mixing in the stream
    is_wanted = tl.load(wanted + row) != 0
    going = is_wanted
    chosen = tl.zeros([], tl.int32)
    floor = tl.full([], -float("inf"), tl.float32)
    log_total = tl.load(log_totals + row)
    mass_limit = tl.load(mass_limits + row)
    top_k = tl.load(top_ks + row)
    least = tl.load(leasts + row)
    while going:
        key_0 = _mixed(key)
        key_1 = _mixed(key_0 ^ 0x3C6EF372)
        best = tl.full([BLOCK], -float("inf"), tl.float32)
        best_ids = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + lanes
            value = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf"))
            score = value - tl.log(_noise(ids, key_0, key_1))
            score = tl.where((value >= least) & (value > floor), score, -float("inf"))
            better = score > best
            best = tl.where(better, score, best)
            best_ids = tl.where(better, ids, best_ids)
        top = tl.max(best, 0)
        chosen = tl.min(tl.where(best == top, best_ids, 0x7FFFFFFF), 0)
        threshold = tl.load(logits + chosen)
        mass = tl.zeros([BLOCK], tl.float32)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            ids = start + lanes
            value = tl.load(logits + ids, mask=ids < vocab_size, other=-float("inf"))
            likelier = value > threshold
            mass += tl.where(likelier, tl.exp(value - log_total), 0.0)
            count += likelier.to(tl.int32)
        num = tl.sum(count, 0)
        kept = (tl.sum(mass, 0) < mass_limit) & ((top_k == 0) | (num < top_k))
        going = (num > 0) & (top > -float("inf")) & (kept == 0)
        floor = threshold
        key = key + 0x9E3779B9  # the next stream
    tl.store(token_ids + row, chosen.to(tl.int64), mask=is_wanted)
