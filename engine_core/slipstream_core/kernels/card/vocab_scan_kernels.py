# mypy: ignore-errors
"""Triton kernels that read rows of logits once, in slices of the vocabulary.

Each program reduces one slice of one row; a second, small kernel joins a row's slices. Slices have
one size whatever the batch, so a row's numbers do not depend on the others.

- Logits are of the model's type and stay as they are. What a request edits is applied while
  reading: `edit_rows` names the row of `edited` that replaces a row's logits, `mask_rows` the row
  of `masks` with a bit for each id that is allowed, the lowest first. -1 is neither, and costs one
  load.
- Of equal values the lowest id is taken, as torch's argmax does.
- Of a row that has NaN or infinity among what it is sampled from, the first of these is taken, also
  where it is drawn, and its score is infinite. No other is: it ends at the largest number.
- The largest logits take a second pass, for a bound that as many reach, and of slices that reach it
  a third.
"""

import triton
import triton.language as tl

from slipstream_core.kernels.card.whole_vocab_kernels import _noise

BLOCK = 2048  # logits at a time
NUM_BLOCKS = 4  # to a slice
NUM_WARPS = 4
TOP_BLOCK = 2048  # logits of which a slice's largest are kept
TOP_GROUP = 128  # logits of which the largest alone says where a row's largest may be
TOP_WARPS = 8
BOUND_WARPS = 4
LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
LOWEST = tl.constexpr(-(1 << 63))
IMPOSSIBLE = tl.constexpr(-2139095041)  # -infinity, ordered
NOWHERE = tl.constexpr(-(1 << 31))


@triton.jit
def _edited_values(
    raw, edited, edit, masks, mask, ids, there, vocab_size, mask_stride, EDITS: tl.constexpr
):
    """The values that a row's ids are sampled from, with edits and masks applied, float32. edit,
    mask: their index for this row, or -1.
    """
    value = raw
    if EDITS:
        if edit >= 0:
            at = edited + edit.to(tl.int64) * vocab_size + ids
            value = tl.load(at, mask=there, other=-float("inf"))
        if mask >= 0:
            at = masks + mask.to(tl.int64) * mask_stride + ids // 32
            words = tl.load(at, mask=there, other=-1)
            value = tl.where(((words >> (ids % 32)) & 1) != 0, value, -float("inf"))
    return value


@triton.jit(
    do_not_specialize=["mask_stride"],
    do_not_specialize_on_alignment=[
        *("edited", "edit_rows", "masks", "mask_rows", "divisors", "drawn"),
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
    best = tl.full([], -float("inf"), tl.float32)
    best_id = first
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    edit = -1
    mask = -1
    if EDITS:
        edit = tl.load(edit_rows + row)
        mask = tl.load(mask_rows + row)
    if DRAWN:
        is_drawn = tl.load(drawn + row) != 0
        divisor = tl.load(divisors + row)
        key_0 = tl.load(keys_0 + row).to(tl.uint32, bitcast=True)
        key_1 = tl.load(keys_1 + row).to(tl.uint32, bitcast=True)
    of_row = logits + row.to(tl.int64) * row_stride
    for block in range(NUM_BLOCKS):
        ids = first + block * BLOCK + lanes
        there = ids < vocab_size
        raw = tl.load(of_row + ids, mask=there, other=-float("inf")).to(tl.float32)
        if TOTALS:
            higher = tl.maximum(top, tl.max(raw, 0))
            level = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - level) + tl.exp(raw - level)
            top = higher
        score = _edited_values(
            raw, edited, edit, masks, mask, ids, there, vocab_size, mask_stride, EDITS
        )
        is_number = score < float("inf")
        if DRAWN:
            if is_drawn:
                score = tl.div_rn(score, divisor) - tl.log(_noise(ids, key_0, key_1))
                score = tl.where(there, tl.minimum(score, LARGEST), -float("inf"))
        score = tl.where(is_number, score, float("inf"))
        highest = tl.max(score, 0)
        if highest > best:
            best = highest
            best_id = tl.min(tl.where(score == highest, ids, 0x7FFFFFFF), 0)
    at = row * tl.num_programs(1) + part
    tl.store(part_best + at, best)
    tl.store(part_ids + at, best_id)
    if TOTALS:
        tl.store(part_tops + at, top)
        tl.store(part_sums + at, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["num_slices"],
    do_not_specialize_on_alignment=[
        *("part_best", "part_ids", "part_tops", "part_sums", "logits"),
        *("token_ids", "undefined", "own", "totals"),
    ],
)
def join_slices(
    part_best,
    part_ids,
    part_tops,
    part_sums,
    logits,  # [S, vocab]
    token_ids,  # [S] int64
    undefined,  # [S] int32
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
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, ids, 0x7FFFFFFF), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    tl.store(undefined + row, (highest == float("inf")).to(tl.int32))
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
    do_not_specialize_on_alignment=["edited", "edit_rows", "masks", "mask_rows", "divisors"],
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
    edit = -1
    mask = -1
    if EDITS:
        edit = tl.load(edit_rows + row)
        mask = tl.load(mask_rows + row)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=there, other=0.0)
    value = _edited_values(
        raw.to(tl.float32), edited, edit, masks, mask, ids, there, vocab_size, mask_stride, EDITS
    )
    value = tl.div_rn(value, tl.load(divisors + row))
    tl.store(scaled + row.to(tl.int64) * vocab_size + ids, value, mask=there)


@triton.jit
def _ordered(value):
    """float32 as int32 in the same order, with one zero; every NaN is beyond an infinity."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def tops_of_groups(
    logits,  # [S, vocab]
    tops,  # [S, slices * BLOCK / GROUP] int32: the largest of each group of a slice, ordered
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: (S, slices)."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocab_size
    at = logits + row.to(tl.int64) * row_stride + ids
    value = tl.load(at, mask=there, other=0.0).to(tl.float32)
    ordered = tl.where(there, _ordered(value), NOWHERE)
    slot = (row * tl.num_programs(1) + part) * (BLOCK // GROUP)
    groups = tl.arange(0, BLOCK // GROUP)
    tl.store(tops + slot + groups, tl.max(tl.reshape(ordered, [BLOCK // GROUP, GROUP]), 1))


@triton.jit(do_not_specialize=["num_groups", "num"])
def bound_top(
    tops,  # [S, num_groups] int32
    bounds,  # [S] int32: at least `num` logits of a row are not below it, in order
    num_groups,
    num,
    MAX_GROUPS: tl.constexpr,
):
    """The `num`-th largest of the groups' largest, bit by bit. Grid: (S,)."""
    row = tl.program_id(0)
    groups = tl.arange(0, MAX_GROUPS)
    found = tl.load(tops + row * num_groups + groups, mask=groups < num_groups, other=NOWHERE)
    found = found.to(tl.uint32, bitcast=True) ^ 0x80000000
    bound = tl.zeros([], tl.uint32)
    step = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        higher = bound | step
        enough = tl.sum((found >= higher).to(tl.int32), 0) >= num
        bound = tl.where(enough, higher, bound)
        step = step >> 1
    tl.store(bounds + row, (bound ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["own", "counts"])
def top_of_slices(
    logits,  # [S, vocab]
    tops,  # [S, slices * BLOCK / GROUP] int32
    bounds,  # [S] int32
    keys,  # [S, slices, NUM] int64: the slice's largest that are not below the bound
    own,  # [S] float32, with RANKS
    counts,  # [S, slices] int32, with RANKS: how many logits are larger than the row's own
    vocab_size,
    row_stride,
    num,  # wanted of the row
    RANKS: tl.constexpr,
    NUM: tl.constexpr,  # the next power of two
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: (S, slices). A key orders by value, then by the lower id, so no two are equal.

    Most slices have nothing that is not below the bound, and are not read again. Where a mask
    leaves fewer than `num` ids, all others are equal: the first of them are enough.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = row.to(tl.int64) * tl.num_programs(1) + part
    groups = tl.arange(0, BLOCK // GROUP)
    highest = tl.max(tl.load(tops + slot * (BLOCK // GROUP) + groups), 0)
    bound = tl.load(bounds + row)
    least = bound
    if RANKS:
        sampled = tl.load(own + row)
        least = tl.minimum(least, _ordered(sampled))
    places = tl.arange(0, NUM)
    found = tl.full([NUM], LOWEST, tl.int64)
    num_larger = 0
    if highest >= least:
        ids = part * BLOCK + tl.arange(0, BLOCK)
        there = ids < vocab_size
        at = logits + row.to(tl.int64) * row_stride + ids
        value = tl.load(at, mask=there, other=0.0).to(tl.float32)
        ordered = _ordered(value)
        if RANKS:
            num_larger = tl.sum((there & (value > sampled)).to(tl.int32), 0)
        key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)
        may_be = there & (ordered >= bound) & ((ordered > IMPOSSIBLE) | (ids < 2 * num))
        key = tl.where(may_be, key, LOWEST)
        best = tl.max(key, 0)
        place = 0
        while (best > LOWEST) & (place < NUM):
            found = tl.where(places == place, best, found)
            key = tl.where(key == best, LOWEST, key)
            best = tl.max(key, 0)
            place += 1
    tl.store(keys + slot * NUM + places, found)
    if RANKS:
        tl.store(counts + slot, num_larger)


@triton.jit(
    do_not_specialize=["num_keys", "num_slices", "num"],
    do_not_specialize_on_alignment=["own", "totals", "counts", "token_ids"],
)
def join_top(
    keys,  # [S, num_keys] int64
    counts,  # [S, num_slices] int32
    token_ids,  # [S] int64
    own,  # [S] float32
    totals,  # [S] float32
    values,  # [S, 1 + num] float32: log-probabilities of the token and of the largest
    ids,  # [S, 1 + num] int64
    ranks,  # [S] int64: of the token, from 1
    num_keys,
    num_slices,
    num,
    MAX_KEYS: tl.constexpr,
    MAX_SLICES: tl.constexpr,
):
    """Grid: (S,)."""
    row = tl.program_id(0)
    places = tl.arange(0, MAX_KEYS)
    key = tl.load(keys + row * num_keys + places, mask=places < num_keys, other=LOWEST)
    total = tl.load(totals + row)
    at = row * (1 + num)
    tl.store(values + at, tl.load(own + row) - total)
    tl.store(ids + at, tl.load(token_ids + row))
    for place in range(1, 1 + num):
        best = tl.max(key, 0)
        key = tl.where(key == best, LOWEST, key)
        ordered = (best >> 32).to(tl.int32)
        value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(values + at + place, value - total)
        tl.store(ids + at + place, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    slices = tl.arange(0, MAX_SLICES)
    larger = tl.load(counts + row * num_slices + slices, mask=slices < num_slices, other=0)
    tl.store(ranks + row, 1 + tl.sum(larger, 0).to(tl.int64))
