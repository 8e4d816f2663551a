# mypy: ignore-errors
"""Triton kernels that read rows of logits once, in slices of the vocabulary.

Each program reduces one slice of one row; a second, small kernel joins a row's slices. Slices have
one size whatever the batch, so a row's numbers do not depend on the others.

- Logits are of the model's type and stay as they are. What a request edits is applied while
  reading: `edit_rows` names the row of `edited` that replaces a row's logits, `mask_rows` the row
  of `masks` with a bit for each id that is allowed, the lowest first. -1 is neither, and costs one
  load.
- Of equal values the lowest id is taken, as torch's argmax does.
"""

import triton
import triton.language as tl

from slipstream_core.runner.sampling.whole_vocab_kernels import _noise

BLOCK = 2048  # logits at a time
NUM_BLOCKS = 4  # to a slice
NUM_WARPS = 4
TOP_BLOCK = 2048  # logits of which a slice's largest are kept
TOP_WARPS = 8
LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _edited_values(
    logits, edited, edit_rows, masks, mask_rows, row, ids, there, vocab_size, mask_stride,
    EDITS: tl.constexpr,
):  # fmt: skip
    """Some values of a row, float32: as the model gave them, and as they are sampled from."""
    raw = tl.load(logits + ids, mask=there, other=-float("inf")).to(tl.float32)
    value = raw
    if EDITS:
        edit = tl.load(edit_rows + row)
        at = edited + edit.to(tl.int64) * vocab_size + ids
        changed = tl.load(at, mask=there & (edit >= 0), other=-float("inf"))
        value = tl.where(edit >= 0, changed, value)
        mask = tl.load(mask_rows + row)
        at = masks + mask.to(tl.int64) * mask_stride + ids // 32
        words = tl.load(at, mask=there & (mask >= 0), other=-1)
        value = tl.where(((words >> (ids % 32)) & 1) != 0, value, -float("inf"))
    return raw, value


@triton.jit(
    do_not_specialize=["mask_stride"],
    do_not_specialize_on_alignment=[
        *("logits", "edited", "edit_rows", "masks", "mask_rows", "divisors", "drawn"),
        *("keys_0", "keys_1", "part_best", "part_ids", "part_tops", "part_sums"),
    ],
)
def scan_slices(
    logits,  # [S, vocab]
    edited,  # [E, vocab] float32, this and the next three with EDITS
    edit_rows,  # [S] int32
    masks,  # [M, mask_stride] int32
    mask_rows,  # [S] int32
    divisors,  # [S] float32, this and the next three with DRAWN
    drawn,  # [S] int32; 0 takes the most likely token
    keys_0,  # [S] int32
    keys_1,  # [S] int32
    part_best,  # [S, slices] float32, the best score
    part_ids,  # [S, slices] int32, its id
    part_tops,  # [S, slices] float32, with TOTALS: the largest logit as the model gave it
    part_sums,  # [S, slices] float32, sum of exp(logit - that)
    vocab_size,
    row_stride,
    mask_stride,
    DRAWN: tl.constexpr,
    EDITS: tl.constexpr,
    TOTALS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Grid: (S, slices)."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    first = part * NUM_BLOCKS * BLOCK
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    best_ids = first + lanes
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if DRAWN:
        is_drawn = tl.load(drawn + row) != 0
        divisor = tl.load(divisors + row)
        key_0 = tl.load(keys_0 + row).to(tl.uint32, bitcast=True)
        key_1 = tl.load(keys_1 + row).to(tl.uint32, bitcast=True)
    of_row = logits + row.to(tl.int64) * row_stride
    for block in range(NUM_BLOCKS):
        ids = first + block * BLOCK + lanes
        there = ids < vocab_size
        raw, value = _edited_values(
            of_row, edited, edit_rows, masks, mask_rows, row, ids, there, vocab_size,
            mask_stride, EDITS,
        )  # fmt: skip
        if TOTALS:
            higher = tl.maximum(top, raw)
            level = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - level) + tl.exp(raw - level)
            top = higher
        score = value
        if DRAWN:
            if is_drawn:
                score = tl.div_rn(value, divisor) - tl.log(_noise(ids, key_0, key_1))
        score = tl.where(there, score, -float("inf"))
        better = score > best
        best = tl.where(better, score, best)
        best_ids = tl.where(better, ids, best_ids)
    at = row * tl.num_programs(1) + part
    highest = tl.max(best, 0)
    tl.store(part_best + at, highest)
    tl.store(part_ids + at, tl.min(tl.where(best == highest, best_ids, 0x7FFFFFFF), 0))
    if TOTALS:
        level = tl.max(top, 0)
        safe = tl.where(level == -float("inf"), 0.0, level)
        tl.store(part_tops + at, level)
        tl.store(part_sums + at, tl.sum(total * tl.exp(top - safe), 0))


@triton.jit(
    do_not_specialize=["num_slices"],
    do_not_specialize_on_alignment=[
        *("part_best", "part_ids", "part_tops", "part_sums", "logits", "token_ids", "own", "totals")
    ],
)
def join_slices(
    part_best,
    part_ids,
    part_tops,
    part_sums,
    logits,  # [S, vocab]
    token_ids,  # [S] int64
    own,  # [S] float32, with TOTALS: the token's logit
    totals,  # [S] float32, with TOTALS: log of the sum of exp(logit)
    num_slices,
    row_stride,
    TOTALS: tl.constexpr,
    MAX_SLICES: tl.constexpr,
):
    """Grid: (S,)."""
    row = tl.program_id(0)
    slices = tl.arange(0, MAX_SLICES)
    there = slices < num_slices
    at = row * num_slices + slices
    best = tl.load(part_best + at, mask=there, other=-float("inf"))
    ids = tl.load(part_ids + at, mask=there, other=0x7FFFFFFF)
    token = tl.min(tl.where(best == tl.max(best, 0), ids, 0x7FFFFFFF), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    if TOTALS:
        tops = tl.load(part_tops + at, mask=there, other=-float("inf"))
        sums = tl.load(part_sums + at, mask=there, other=0.0)
        top = tl.max(tops, 0)
        safe = tl.where(top == -float("inf"), 0.0, top)
        tl.store(totals + row, safe + tl.log(tl.sum(sums * tl.exp(tops - safe), 0)))
        value = tl.load(logits + row.to(tl.int64) * row_stride + token)
        tl.store(own + row, value.to(tl.float32))


@triton.jit(
    do_not_specialize=["mask_stride"],
    do_not_specialize_on_alignment=[
        *("logits", "edited", "edit_rows", "masks", "mask_rows", "divisors", "scaled")
    ],
)
def scale_rows(
    logits,  # [S, vocab]
    edited,
    edit_rows,
    masks,
    mask_rows,
    divisors,  # [S] float32
    scaled,  # [S, vocab] float32
    vocab_size,
    row_stride,
    mask_stride,
    EDITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write what rows are sampled from, over their temperature. Grid: (S, blocks)."""
    row = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocab_size
    _, value = _edited_values(
        logits + row.to(tl.int64) * row_stride, edited, edit_rows, masks, mask_rows, row, ids,
        there, vocab_size, mask_stride, EDITS,
    )  # fmt: skip
    value = tl.div_rn(value, tl.load(divisors + row))
    tl.store(scaled + row.to(tl.int64) * vocab_size + ids, value, mask=there)


@triton.jit(do_not_specialize_on_alignment=["logits", "keys", "own", "counts"])
def top_of_slices(
    logits,  # [S, vocab]
    keys,  # [S, slices, NUM] int64: the largest of each slice; larger is better
    own,  # [S] float32, with RANKS
    counts,  # [S, slices] int32, with RANKS: how many logits are larger than the row's own
    vocab_size,
    row_stride,
    RANKS: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (S, slices). A key orders by value, then by the lower id, so no two are equal."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocab_size
    at = logits + row.to(tl.int64) * row_stride + ids
    value = tl.load(at, mask=there, other=-float("inf")).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # one zero
    bits = value.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = tl.where(there, (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64), LOWEST)
    slot = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(keys + slot * NUM + tl.arange(0, NUM), tl.topk(key, NUM))
    if RANKS:
        larger = there & (value > tl.load(own + row))
        tl.store(counts + slot, tl.sum(larger.to(tl.int32), 0))
