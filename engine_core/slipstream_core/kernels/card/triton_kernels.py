# mypy: ignore-errors
"""Triton kernels of paged attention: deal out keys, attend, combine parts, store keys and values.

`triton_backend` launches them, with pointers, strides and sizes.

One kernel attends for decode and prefill. A program has a tile of BLOCK_M rows, which are queries
times the query heads of one key head, so a key is loaded once for all of them. It walks the row's
keys BLOCK_N at a time with the online softmax of Flash Attention (Dao 2023, arXiv 2307.08691), and
finds each key through the block table (Kwon et al. 2023, arXiv 2309.06180), so BLOCK_N is
independent of BLOCK_SIZE. The keys of a row may be shared by several programs (Flash-Decoding, Dao
et al. 2023), whose partial results `combine` joins: a decode row's by as many as `deal` says, which
sees all rows' lengths, and a prefill row's, with SPLIT, by equally many each.

- Scores are multiplied by log2(e), for exp2; sums, maxima and the accumulator are float32.
- Where latents are cached (LATENT), a value is the beginning of its key, loaded once for both, and
  a key is multiplied in two parts: that one, and its rotated end. All query heads have the same key
  head; GROUP of them are a program's.
- A row that sees no key (padding: kv_len 0) gives zeros, not NaN.
- Nothing behind a row's end is read, so what other requests left there may be NaN.
- float32 is multiplied in full precision ("ieee"): tf32 would be off by 1e-3.
- Arguments that change from step to step are `do_not_specialize`, and so is the alignment of
  columns that may lie anywhere in a buffer: a new value must not trigger a compilation.
- UPCAST multiplies bfloat16 in float32, which gives the same products: Triton's interpreter has
  no bfloat16, and multiplies its bits as integers.
"""

import triton
import triton.language as tl

from slipstream_core.kernels.card.dependent_launch import begin_early

LOG2E = tl.constexpr(1.4426950408889634)
AT_ONCE = tl.constexpr(1024)  # rows or items that one program of `deal` looks at
STORED_AT_ONCE = 1024  # elements that one program of `store` moves


@triton.jit
def _tiles(
    acc,  # [BLOCK_M, VALUE_PAD] float32
    top,  # [BLOCK_M] float32, the highest score so far
    total,  # [BLOCK_M] float32, sum of exp2(score - top)
    query,  # [BLOCK_M, KEY_PAD]; with LATENT its rotated end
    latent_query,  # [BLOCK_M, VALUE_PAD], with LATENT: its beginning
    positions,  # [BLOCK_M] int32, of the queries in their row
    begin,  # of the keys, a multiple of BLOCK_N
    end,
    kv_len,
    keys,  # pointers to this head in slot 0
    values,
    table,  # pointer to this row's blocks
    key_slot,
    value_slot,
    scale,
    cap,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
    MASKED: tl.constexpr,  # whether some key is hidden from some query
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Continue the softmax over the keys [begin, end); returns acc, top, total."""
    key_dims = tl.arange(0, KEY_PAD)
    if LATENT:
        key_dims += VALUE_DIM
    LOADED_DIM: tl.constexpr = KEY_DIM - VALUE_DIM if LATENT else KEY_DIM
    value_dims = tl.arange(0, VALUE_PAD)
    for start in range(begin, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        there = places < kv_len
        if MASKED:
            blocks = tl.load(table + places // BLOCK_SIZE, mask=there, other=0)
        else:
            blocks = tl.load(table + places // BLOCK_SIZE)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + places % BLOCK_SIZE

        at_keys = keys + slots[None, :] * key_slot + key_dims[:, None]
        if MASKED and KEY_PAD != LOADED_DIM:
            key = tl.load(at_keys, mask=there[None, :] & (key_dims[:, None] < KEY_DIM), other=0.0)
        elif MASKED:
            key = tl.load(at_keys, mask=there[None, :], other=0.0)
        elif KEY_PAD != LOADED_DIM:
            key = tl.load(at_keys, mask=key_dims[:, None] < KEY_DIM, other=0.0)
        else:
            key = tl.load(at_keys)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee")
        if LATENT:
            value = _values(
                values, slots, value_slot, value_dims, there, VALUE_DIM, VALUE_PAD, MASKED
            )
            turned = tl.trans(value)
            if UPCAST:
                turned = turned.to(tl.float32)
            scores = tl.dot(latent_query, turned, scores, input_precision="ieee")
        scores = scores * scale
        if SOFTCAP:  # cap * tanh(s / cap); the host's scale includes 2 log2(e) / cap
            scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
        if MASKED:
            seen = places[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (places[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))

        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == -float("inf"), 0.0, higher) if MASKED else higher
        probs = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(probs, 1)
        acc = acc * shrink[:, None]
        top = higher

        if not LATENT:
            value = _values(
                values, slots, value_slot, value_dims, there, VALUE_DIM, VALUE_PAD, MASKED
            )
        weights = probs.to(value.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        acc = tl.dot(weights, value, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def _values(
    values,
    slots,
    value_slot,
    value_dims,
    there,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile of values, [BLOCK_N, VALUE_PAD]."""
    at = values + slots[:, None] * value_slot + value_dims[None, :]
    if MASKED and VALUE_PAD != VALUE_DIM:
        value = tl.load(at, mask=there[:, None] & (value_dims[None, :] < VALUE_DIM), other=0.0)
    elif MASKED:
        value = tl.load(at, mask=there[:, None], other=0.0)
    elif VALUE_PAD != VALUE_DIM:
        value = tl.load(at, mask=value_dims[None, :] < VALUE_DIM, other=0.0)
    else:
        value = tl.load(at)
    return value


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "budget"],
    do_not_specialize_on_alignment=["kv_lens", "num_decodes"],
)
def deal(
    work,  # [2 + num_rows + num_items] int32
    kv_lens,  # [num_rows] int32
    num_decodes,  # [1] int32, with COUNTED: the rows behind are not dealt out
    num_rows,
    num_items,  # num_rows + budget at least
    budget,  # programs that all rows' keys are cut for, each row's rest aside
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNTED: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Deal out decode rows' keys in items of equal size. Grid: (num_rows,).

    work[0] is the tiles of an item, work[1 + r] the first item of row r, up to and with the number
    of items; behind them is each item's row, -1 where there is no more.
    """
    begin_early(EARLY)
    row = tl.program_id(0)
    lanes = tl.arange(0, AT_ONCE)
    real = num_rows
    if COUNTED:
        real = tl.load(num_decodes)
    total = 0
    for start in range(0, num_rows, AT_ONCE):
        total += tl.sum(_tiles_of(kv_lens, start + lanes, real, WINDOW, BLOCK_N), 0)
    share = tl.maximum(tl.cdiv(total, budget), 1)
    first = 0
    mine = 0
    for start in range(0, num_rows, AT_ONCE):
        rows = start + lanes
        tiles = _tiles_of(kv_lens, rows, real, WINDOW, BLOCK_N)
        parts = tl.where(rows < real, tl.maximum(tl.cdiv(tiles, share), 1), 0)
        first += tl.sum(tl.where(rows < row, parts, 0), 0)
        mine += tl.sum(tl.where(rows == row, parts, 0), 0)
    items = work + 2 + num_rows
    for start in range(0, mine, AT_ONCE):
        at = start + lanes
        tl.store(items + first + at, at * 0 + row, mask=at < mine)
    tl.store(work + 1 + row, first)
    if row == num_rows - 1:
        end = first + mine
        tl.store(work, share)
        tl.store(work + 1 + num_rows, end)
        for start in range(end, num_items, AT_ONCE):
            at = start + lanes
            tl.store(items + at, at * 0 - 1, mask=at < num_items)


@triton.jit
def _tiles_of(kv_lens, rows, real, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tiles of keys that these decode rows see."""
    lens = tl.load(kv_lens + rows, mask=rows < real, other=0)
    if WINDOW > 0:
        lens = lens - tl.maximum(lens - WINDOW, 0) // BLOCK_N * BLOCK_N
    return tl.cdiv(lens, BLOCK_N)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=[
        "block_tables",
        "table_rows",
        "query_starts",
        "kv_lens",
        "num_decodes",
    ],
)
def attend(
    output,  # [T, heads, VALUE_DIM]
    part_acc,  # [items, heads, VALUE_DIM] or [tokens, heads, num_splits, VALUE_DIM] float32
    part_top,  # [items, heads] or [tokens, heads, num_splits] float32
    part_total,  # likewise
    work,  # of `deal`, with DECODE
    num_decodes,  # [1] int32, not with DECODE: the first prefill row, and token
    query,  # [T, heads, KEY_DIM]
    keys,  # [slots, kv heads, KEY_DIM]
    values,  # [slots, kv heads, VALUE_DIM]
    block_tables,  # [slots, table_stride] int32
    table_rows,  # [R] int64: whose tables they are
    query_starts,  # [R + 1] int32, not with DECODE
    kv_lens,  # [R] int32
    sinks,  # [heads], with SINKS
    scale,
    cap,
    num_rows,  # with DECODE those that `work` is for, else all
    table_stride,
    num_splits,
    query_token,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    GROUP: tl.constexpr,  # query heads per key head; with LATENT some of them
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,  # the next power of two, 16 at least; with LATENT of the rotated end
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: all
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LATENT: tl.constexpr,
    DECODE: tl.constexpr,  # row r has one token, token r
    SPLIT: tl.constexpr,  # of prefill rows
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Grid: (items or query tiles, groups of query heads, splits)."""
    begin_early(EARLY)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP

    # the row and queries of this tile
    split = tl.program_id(2)
    if DECODE:
        item = tl.program_id(0)
        row = tl.load(work + 2 + num_rows + item)
        if row < 0:
            return
        split = item - tl.load(work + 1 + row)
        num_parts = tl.load(work + 2 + row) - tl.load(work + 1 + row)
        begin = row
        query_len = 1
        first_query = 0
    else:
        first_row = tl.load(num_decodes)
        first_token = first_row
        num_rows -= first_row
        # Row i has its tiles from (its first token) // BLOCK_Q + i on, which leaves room for any
        # length. The last tile comes first, as it has the most keys.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        low = 0
        high = num_rows
        while low < high:
            middle = (low + high) // 2
            at = (tl.load(query_starts + first_row + middle) - first_token) // BLOCK_Q + middle
            if at <= tile:
                low = middle + 1
            else:
                high = middle
        row = first_row + low - 1
        begin = tl.load(query_starts + row)
        query_len = tl.load(query_starts + row + 1) - begin
        first_query = (tile - ((begin - first_token) // BLOCK_Q + low - 1)) * BLOCK_Q
        if first_query >= query_len:
            return
    kv_len = tl.load(kv_lens + row)

    lanes = tl.arange(0, BLOCK_M)
    queries = first_query + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    real = (lanes < BLOCK_Q * GROUP) & (queries < query_len)
    tokens = (begin + queries).to(tl.int64)
    first_position = kv_len - query_len + first_query
    positions = kv_len - query_len + queries
    key_dims = tl.arange(0, KEY_PAD)
    if LATENT:
        key_dims += VALUE_DIM
    value_dims = tl.arange(0, VALUE_PAD)
    at_queries = query + (tokens * query_token + heads.to(tl.int64) * query_head)[:, None]
    loaded = tl.load(
        at_queries + key_dims[None, :],
        mask=real[:, None] & (key_dims[None, :] < KEY_DIM),
        other=0.0,
    )
    latent_query = loaded
    if LATENT:
        latent_query = tl.load(
            at_queries + value_dims[None, :],
            mask=real[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
    if UPCAST:
        loaded = loaded.to(tl.float32)
        latent_query = latent_query.to(tl.float32)

    # the keys that this tile sees, and this program's share of them
    low_key = 0
    if WINDOW > 0:
        low_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    high_key = tl.minimum(kv_len, first_position + BLOCK_Q)
    if DECODE:
        share = tl.load(work) * BLOCK_N
        low_key = low_key + split * share
        high_key = tl.minimum(high_key, low_key + share)
    elif SPLIT:
        share = tl.cdiv(tl.cdiv(high_key - low_key, BLOCK_N), num_splits) * BLOCK_N
        low_key = low_key + split * share
        high_key = tl.minimum(high_key, low_key + share)

    if SINKS and not SPLIT:
        top = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
        if DECODE:  # of a row in parts, `combine` takes the sink
            top = tl.where(num_parts > 1, -float("inf"), top)
            total = tl.where(num_parts > 1, 0.0, total)
    else:
        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    keys_of_head = keys + kv_head * key_head
    values_of_head = values + kv_head * value_head
    table = block_tables + tl.load(table_rows + row) * table_stride
    masked_from = low_key
    if not DECODE and WINDOW == 0:
        # all queries see the keys up to the first query's own
        masked_from = tl.minimum(high_key, (first_position + 1) // BLOCK_N * BLOCK_N)
        masked_from = tl.maximum(masked_from, low_key)
        acc, top, total = _tiles(
            acc, top, total, loaded, latent_query, positions, low_key, masked_from, kv_len,
            keys_of_head, values_of_head, table, key_slot, value_slot, scale, cap,
            KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BLOCK_SIZE, WINDOW, SOFTCAP,
            LATENT, False, UPCAST, BLOCK_N,
        )  # fmt: skip
    acc, top, total = _tiles(
        acc, top, total, loaded, latent_query, positions, masked_from, high_key, kv_len,
        keys_of_head, values_of_head, table, key_slot, value_slot, scale, cap,
        KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BLOCK_SIZE, WINDOW, SOFTCAP,
        LATENT, True, UPCAST, BLOCK_N,
    )  # fmt: skip

    wanted = real[:, None] & (value_dims[None, :] < VALUE_DIM)
    if SPLIT:
        part = ((tokens - first_token) * num_heads + heads) * num_splits + split
        _store_part(part_acc, part_top, part_total, part, acc, top, total, real, wanted, VALUE_DIM)
    elif DECODE:
        if num_parts > 1:
            part = item.to(tl.int64) * num_heads + heads
            _store_part(
                part_acc, part_top, part_total, part, acc, top, total, real, wanted, VALUE_DIM
            )
        else:
            _store_result(output, tokens * num_heads + heads, acc, total, wanted, VALUE_DIM)
    else:
        _store_result(output, tokens * num_heads + heads, acc, total, wanted, VALUE_DIM)


@triton.jit
def _store_result(output, places, acc, total, wanted, VALUE_DIM: tl.constexpr):
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = output + places[:, None] * VALUE_DIM + tl.arange(0, acc.shape[1])[None, :]
    tl.store(at, acc.to(output.dtype.element_ty), mask=wanted)


@triton.jit
def _store_part(
    part_acc, part_top, part_total, part, acc, top, total, real, wanted, VALUE_DIM: tl.constexpr
):
    tl.store(part_top + part, top, mask=real)
    tl.store(part_total + part, total, mask=real)
    wanted = wanted & (top > -float("inf"))[:, None]
    at = part_acc + part[:, None] * VALUE_DIM + tl.arange(0, acc.shape[1])[None, :]
    tl.store(at, acc, mask=wanted)


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["num_decodes"],
)
def combine(
    output,  # [T, heads, VALUE_DIM]
    part_acc,
    part_top,
    part_total,
    work,
    num_decodes,
    sinks,
    num_tokens,  # of the whole step
    num_splits,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    DECODE: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts
    EARLY: tl.constexpr = False,
):
    """Join the partial results of a token's head. Grid: (tokens, heads)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    if DECODE:
        first = tl.load(work + 1 + token)
        num_splits = tl.load(work + 2 + token) - first
        if num_splits <= 1:
            return
        first = first.to(tl.int64) * num_heads + head
        step = num_heads
        row = token
    else:
        row = token + tl.load(num_decodes)
        if row >= num_tokens:
            return
        first = (token * num_heads + head) * num_splits
        step = 1
    dims = tl.arange(0, VALUE_PAD)
    top = -float("inf")
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
    total = 0.0
    if SINKS:
        total = 1.0
    acc = tl.zeros([VALUE_PAD], tl.float32)
    for start in range(0, num_splits, AT_ONCE):
        splits = start + tl.arange(0, AT_ONCE)
        parts = first + splits * step
        tops = tl.load(part_top + parts, mask=splits < num_splits, other=-float("inf"))
        totals = tl.load(part_total + parts, mask=splits < num_splits, other=0.0)
        # asked for before it is known of which parts nothing is stored, as they have no keys
        values = tl.load(
            part_acc + parts[:, None] * VALUE_DIM + dims[None, :],
            mask=(splits < num_splits)[:, None] & (dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        level = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(tops - level)
        shrink = tl.exp2(top - level)
        total = total * shrink + tl.sum(totals * weights, 0)
        values = tl.where((tops > -float("inf"))[:, None], values * weights[:, None], 0.0)
        acc = acc * shrink + tl.sum(values, 0)
        top = higher
    joined = acc / tl.where(total == 0.0, 1.0, total)
    at = output + (row * num_heads + head) * VALUE_DIM + dims
    tl.store(at, joined.to(output.dtype.element_ty), mask=dims < VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=["kv_slots"])
def store(
    key,  # [T, kv heads, KEY_DIM]
    value,  # [T, kv heads, VALUE_DIM]
    keys,  # [slots, kv heads, KEY_DIM]
    values,  # [slots, kv heads, VALUE_DIM]
    kv_slots,  # [T] int64
    key_token,
    key_head,
    value_token,
    value_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,  # kv heads times dim
    VALUE_WIDTH: tl.constexpr,  # 0: a value is the beginning of its key
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Write tokens' keys and values to their slots. Grid: (T, blocks of the wider of the two)."""
    begin_early(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(kv_slots + token)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_key = key + token * key_token + places // KEY_DIM * key_head + places % KEY_DIM
    moved = tl.load(of_key, mask=places < KEY_WIDTH, other=0.0)
    tl.store(keys + slot * KEY_WIDTH + places, moved, mask=places < KEY_WIDTH)
    if VALUE_WIDTH > 0:
        of_token = value + token * value_token
        of_value = of_token + places // VALUE_DIM * value_head + places % VALUE_DIM
        moved = tl.load(of_value, mask=places < VALUE_WIDTH, other=0.0)
        tl.store(values + slot * VALUE_WIDTH + places, moved, mask=places < VALUE_WIDTH)
