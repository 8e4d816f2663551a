"""Paged CPU attention against a few lines that attend token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.rounded_caches import decoded, encoded

from slipstream_core.attention import kv_cache
from slipstream_core.attention.batch_order import HostRows
from slipstream_core.attention.cache_formats import CacheFormat
from slipstream_core.attention.cpu_backend import CpuContext
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionParams, paged_attention
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.attention.torch_backend import Scratch, TorchAttention, TorchContext
from slipstream_core.kernels.cpu.kernels import Kernels, kernels

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


@dataclass(frozen=True)
class Case:
    num_kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    block_size: int
    decode_lens: list[int]  # kv lengths of the decode rows, ascending
    chunks: list[tuple[int, int]]  # of the prefill rows: tokens before, tokens now
    blocks_per_bucket: int
    window: int | None
    softcap: float | None
    sinks: bool
    seed: int
    num_rotated: int | None = None  # of latents: numbers of a key behind those of its value
    chunk: int | None = None


CASES = st.builds(
    Case,
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 20]),
    key_dim=st.sampled_from([8, 16]),
    value_dim=st.sampled_from([8, 16]),
    block_size=st.sampled_from([1, 4, 16]),
    decode_lens=st.lists(st.integers(1, 50), max_size=6).map(sorted),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=3),
    blocks_per_bucket=st.sampled_from([1, 12, 1000]),
    window=st.sampled_from([None, None, 1, 5, 1000]),
    softcap=st.sampled_from([None, None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
    num_rotated=st.sampled_from([None, None, 4, 8]),
    chunk=st.sampled_from([None, None, 1, 3, 16, 1000]),
).filter(lambda case: case.decode_lens or case.chunks)


@dataclass
class Step:
    """A case made concrete: every sequence's keys and values, and this step's part of them."""

    context: Any  # an AttentionContext
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    params: AttentionParams
    expected: torch.Tensor


def make_step(
    case: Case, num_layers: int = 1, kernels: Kernels | None = None, form: CacheFormat = "auto"
) -> Step:
    is_latent = case.num_rotated is not None
    if case.num_rotated is not None:
        case = replace(case, num_kv_heads=1, key_dim=case.value_dim + case.num_rotated)
    torch.manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    num_heads = case.num_kv_heads * case.group
    befores = [n - 1 for n in case.decode_lens] + [before for before, _ in case.chunks]
    counts = [1] * len(case.decode_lens) + [count for _, count in case.chunks]
    kv_lens = np.array(befores, np.int32) + np.array(counts, np.int32)
    num_blocks = -(-kv_lens // case.block_size)
    free = rng.permutation(int(num_blocks.sum()) + 5) + 1
    tables = np.zeros((len(kv_lens), int(num_blocks.max())), np.int32)
    for row, used in enumerate(num_blocks):
        tables[row, :used], free = free[:used], free[used:]
    geometry = LayerGeometry(
        num_heads=num_heads,
        num_kv_heads=case.num_kv_heads,
        key_dim=case.key_dim,
        value_dim=case.value_dim,
        window=case.window,
        softcap=case.softcap,
        has_sinks=True,
        is_latent=is_latent,
    )
    layers = kv_cache.allocate(
        [geometry] * num_layers,
        num_blocks=int(num_blocks.sum()) + 6,
        block_size=case.block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        form=form,
    )
    for layer in layers:  # what other requests left behind
        if form == "auto":
            layer.keys.normal_(0, 100)
            layer.values.normal_(0, 100)
        else:
            layer.keys.random_(0, 256)
            layer.values.random_(0, 256)
    params = AttentionParams(
        scale=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=torch.randn(num_heads) if case.sinks else None,
        is_latent=is_latent,
        chunk=case.chunk,
    )
    query = torch.randn(sum(counts), num_heads, case.key_dim)
    slots, keys, values, expected = [], [], [], []
    start = 0
    for row, (before, count) in enumerate(zip(befores, counts, strict=True)):
        positions = torch.arange(before + count)
        table = torch.from_numpy(tables[row]).long()
        places = table[positions // case.block_size] * case.block_size
        places += positions % case.block_size
        key = torch.randn(before + count, case.num_kv_heads, case.key_dim)
        value = torch.randn(before + count, case.num_kv_heads, case.value_dim)
        if is_latent:
            value = key[..., : case.value_dim]
        for layer in layers:
            was = key[:before], value[:before]
            layer.store(
                places[:before], *was if form == "auto" else (encoded(form, x) for x in was)
            )
        slots.append(places[before:])
        keys.append(key[before:])
        values.append(value[before:])
        if form != "auto":
            key, value = (decoded(form, encoded(form, each)) for each in (key, value))
            value = key[..., : case.value_dim] if is_latent else value
        for i in range(count):
            end = before + i + 1
            expected.append(attend_one(query[start + i], key[:end], value[:end], params))
        start += count
    # tables lie by slot, and those of rows before are in between
    slots_of_rows = 1 + 2 * np.arange(len(tables))[::-1]
    by_slot = np.full((2 * len(tables), tables.shape[1]), 1, np.int32)
    by_slot[slots_of_rows] = tables
    rows = HostRows(
        num_decodes=len(case.decode_lens),
        query_lens=np.array(counts, np.int32),
        kv_lens=kv_lens,
        slots=slots_of_rows,
        block_tables=by_slot,
        block_size=case.block_size,
    )
    scratch, kv_slots = Scratch(torch.float32, torch.device("cpu")), torch.cat(slots)
    attention = TorchAttention(rows, blocks_per_bucket=case.blocks_per_bucket, scratch=scratch)
    context: Any = TorchContext(layers, kv_slots, attention)
    if kernels is not None:
        context = CpuContext(kernels, layers, rows, kv_slots.numpy())
    return Step(
        context, query, torch.cat(keys), torch.cat(values), params, torch.stack(expected).float()
    )


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """One token's output, float64 [heads, value_dim]; it is the last of `key`."""
    num_keys = len(key)
    if params.window is not None:
        key, value = key[-params.window :], value[-params.window :]
    if params.chunk is not None:
        num_before = (position := num_keys - 1) // params.chunk * params.chunk
        seen = min(len(key), position + 1 - num_before)
        key, value = key[-seen:], value[-seen:]
    group = len(query) // key.shape[1]
    outputs = []
    for head, q in enumerate(query.double()):
        scores = key[:, head // group].double() @ q * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        if params.sinks is not None:
            scores = torch.cat([scores, params.sinks[head].double()[None]])
        probs = scores.softmax(-1)[: len(key)]
        outputs.append(probs @ value[:, head // group].double())
    return torch.stack(outputs)


@given(CASES)
@settings(deadline=None, max_examples=200)
def test_equals_token_by_token(case: Case) -> None:
    step = make_step(case, num_layers=2)
    for layer in (0, 1, 1):  # the step's masks and buckets serve every layer
        output = step.context.attend(layer, step.query, step.key, step.value, step.params)
        torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)


needs_compiler = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")


@needs_compiler
@given(CASES, st.booleans())
@settings(deadline=None, max_examples=200)
def test_the_kernel_equals_token_by_token(case: Case, turned: bool) -> None:
    step = make_step(case, num_layers=2, kernels=kernels())
    tensors = step.query, step.key, step.value
    if turned:  # as models hand them over: heads first, in memory
        tensors = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors)  # type: ignore[assignment]
    for layer in (0, 1, 1):
        output = step.context.attend(layer, *tensors, step.params)
        torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("form", ["fp8_e4m3", "int8_per_token_head"])
@given(case=CASES)
@settings(deadline=None, max_examples=100)
def test_the_kernel_attends_to_what_codes_mean(form: CacheFormat, case: Case) -> None:
    step = make_step(case, num_layers=2, kernels=kernels(), form=form)
    for layer in (0, 1, 1):
        output = step.context.attend(layer, step.query, step.key, step.value, step.params)
        torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)


def assert_each_row_is_the_same_alone(step: Step, block_size: int) -> None:
    """A prompt's token has the bits that it has as a row that decodes."""
    tensors = step.query, step.key, step.value
    together = step.context.attend(0, *tensors, step.params)
    kv_slots, tables, slots, lens, _ = step.context._columns
    rows = HostRows(len(lens), np.ones(len(lens), np.int32), lens, slots, tables, block_size)
    context = CpuContext(step.context._kernels, step.context.layers, rows, kv_slots)
    assert context.decodes_only
    assert torch.equal(context.attend(0, *tensors, step.params), together)


@needs_compiler
@pytest.mark.parametrize("form", ["auto", "fp8_e4m3", "int8_per_token_head"])
@given(case=CASES)
@settings(deadline=None, max_examples=100)
def test_a_tokens_bits_depend_on_what_it_attends_to_alone(form: CacheFormat, case: Case) -> None:
    assert_each_row_is_the_same_alone(
        make_step(case, kernels=kernels(), form=form), case.block_size
    )


@needs_compiler
@pytest.mark.parametrize("form", ["auto", "fp8_e4m3", "int8_per_token_head"])
@pytest.mark.parametrize("window", [None, 1, 33, 50])
@pytest.mark.parametrize("num_rotated", [None, 12])
def test_the_same_of_several_tiles(
    form: CacheFormat, window: int | None, num_rotated: int | None
) -> None:
    chunks = [(0, 75), (31, 40), (90, 3)]
    case = Case(2, 3, 45, 41, 4, [1, 33, 70], chunks, 1, window, None, True, 1, num_rotated)
    step = make_step(case, kernels=kernels(), form=form)
    output = step.context.attend(0, step.query, step.key, step.value, step.params)
    torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)
    assert_each_row_is_the_same_alone(step, case.block_size)


@needs_compiler
@pytest.mark.parametrize("form", ["fp8_e4m3", "int8_per_token_head"])
@pytest.mark.parametrize("dim", [3, 8, 12, 64, 100])
def test_the_kernel_stores_the_codes_that_torch_makes(form: CacheFormat, dim: int) -> None:
    case = Case(3, 2, dim, dim + 1, 4, [5, 9, 30], [(2, 40)], 1000, None, None, False, 1)
    step = make_step(case, kernels=kernels(), form=form)
    numbers = (
        torch.randn(len(step.key), 3, dim) * torch.logspace(-30, 3, len(step.key))[:, None, None]
    )
    numbers[3, 1] = 0
    numbers[4, 0, 1], numbers[5, 0, 1], numbers[6, 0, 1] = torch.nan, torch.inf, -torch.inf
    numbers[7] = torch.arange(dim) * 0.5 * 2.0**-9  # halves of the smallest
    numbers[8] = 16 + torch.arange(dim)  # between two, of which the even one is taken
    numbers[9] = numbers[9].sign() * 186 * 2.0**-149  # of a scale that is rounded to 2**-149
    numbers[10] = torch.randn(3, dim) * 1e37
    step.context.attend(0, step.query, numbers, step.value, step.params)
    cache, slots = step.context._layers[0], torch.from_numpy(step.context._columns[0])
    stored, expected = cache.keys[slots], encoded(form, numbers)
    found, meant = decoded(form, stored), decoded(form, expected)
    assert torch.equal(found.isnan(), meant.isnan())
    is_number = ~meant.isnan().any(-1)
    assert torch.equal(stored[is_number], expected[is_number])
    if form == "int8_per_token_head":  # no number changes its sign or half of the largest
        largest = numbers.abs().amax(-1, keepdim=True)
        assert ((found - numbers).abs() <= largest / 2)[is_number].all()
    assert is_number.sum() >= is_number.numel() - 3
    assert torch.equal(cache.values[slots], encoded(form, step.value))


@needs_compiler
@pytest.mark.parametrize("dim", [3, 12, 64, 80, 100])
@pytest.mark.parametrize("lens", [[1], [33, 300, 70], [5] * 11])
def test_the_kernel_takes_any_head_and_any_length(dim: int, lens: list[int]) -> None:
    case = Case(3, 2, dim, dim + 1, 16, sorted(lens), [], 1000, None, None, False, 1)
    step = make_step(case, kernels=kernels())
    output = step.context.attend(0, step.query, step.key, step.value, step.params)
    torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)


@needs_compiler
def test_the_kernel_reads_nothing_behind_a_row() -> None:
    """So its blocks need not be cleared: what others left there may be no number at all."""
    case = Case(2, 2, 16, 16, 16, [3, 17, 40], [(7, 5)], 20, None, None, False, 0)
    step = make_step(case, kernels=kernels())
    plain = make_step(case)
    cache = step.context._layers[0]
    written = torch.zeros(len(cache.keys), dtype=torch.bool)
    tables, slots, lens = step.context._columns[1:4]
    for slot, length in zip(slots, lens, strict=True):
        table, positions = tables[slot], np.arange(length)
        written[table[positions // 16].astype(np.int64) * 16 + positions % 16] = True
    cache.keys[~written] = torch.nan
    cache.values[~written] = torch.nan
    output = step.context.attend(0, step.query, step.key, step.value, step.params)
    torch.testing.assert_close(output, plain.expected, atol=2e-5, rtol=1e-4)


@needs_compiler
def test_rows_may_share_blocks() -> None:
    step = make_step(Case(2, 2, 16, 16, 4, [9, 9], [], 20, None, None, False, 0), kernels=kernels())
    before = step.context.attend(0, step.query, step.key, step.value, step.params)
    tables, slots = step.context._columns[1:3]
    shared = step.context._layers[0]
    first, second = tables[slots, 0].astype(np.int64) * 4
    shared.keys[second : second + 4] = shared.keys[first : first + 4]
    shared.values[second : second + 4] = shared.values[first : first + 4]
    copied = step.context.attend(0, step.query, step.key, step.value, step.params)
    tables[slots[1], 0] = tables[slots[0], 0]
    named = step.context.attend(0, step.query, step.key, step.value, step.params)
    assert torch.equal(copied, named)
    assert not torch.equal(before, named)


def full_in_chunks(step: Step) -> AttentionParams:
    return step.params._replace(chunk=4)


def test_layers_of_one_step_may_differ() -> None:
    case = Case(2, 2, 16, 16, 4, [3, 9, 9, 30], [(7, 5), (0, 12)], 20, None, None, False, 0)
    step = make_step(case)
    full = step.context.attend(0, step.query, step.key, step.value, step.params)
    narrow = step.params._replace(window=4)
    windowed = step.context.attend(0, step.query, step.key, step.value, narrow)
    again = step.context.attend(0, step.query, step.key, step.value, step.params)
    chunked = step.context.attend(0, step.query, step.key, step.value, full_in_chunks(step))
    assert not torch.allclose(full, windowed)
    assert not torch.allclose(full, chunked)
    assert not torch.allclose(windowed, chunked)
    assert torch.equal(full, again)
    torch.testing.assert_close(full, step.expected, atol=2e-5, rtol=1e-4)


def test_the_interface_translates_shapes() -> None:
    case = Case(2, 2, 16, 8, 4, [3, 9], [(7, 5)], 20, None, None, False, 0)
    step = make_step(case)
    module = torch.nn.Module()
    module.layer_idx = 0
    output, weights = paged_attention(
        module,
        step.query.transpose(0, 1)[None],
        step.key.transpose(0, 1)[None],
        step.value.transpose(0, 1)[None],
        None,
        scaling=0.3,
        dropout=0.0,
        position_ids=None,
        paged=step.context,
    )
    assert weights is None
    torch.testing.assert_close(output[0], step.expected, atol=2e-5, rtol=1e-4)


def test_the_interface_refuses_what_it_cannot_honour() -> None:
    module = torch.nn.Module()
    module.layer_idx = 0
    tensor = torch.zeros(1, 2, 3, 4)
    context = make_step(Case(1, 1, 8, 8, 4, [3], [], 20, None, None, False, 0)).context
    with pytest.raises(TypeError, match="does not pass its keyword arguments on"):
        paged_attention(module, tensor, tensor, tensor, None)
    with pytest.raises(TypeError, match="its own attention mask"):
        paged_attention(module, tensor, tensor, tensor, tensor, paged=context)
    with pytest.raises(TypeError, match="not causal"):
        paged_attention(module, tensor, tensor, tensor, None, paged=context, is_causal=False)
    module.is_causal = False
    with pytest.raises(TypeError, match="not causal"):
        paged_attention(module, tensor, tensor, tensor, None, paged=context)
    module.is_causal = True
    with pytest.raises(TypeError, match="'position_bias'"):
        paged_attention(module, tensor, tensor, tensor, None, paged=context, position_bias=tensor)


def test_bfloat16() -> None:
    case = Case(2, 3, 16, 16, 4, [3, 9, 9, 30], [(7, 5), (0, 12)], 20, 6, None, True, 0)
    step = make_step(case)
    half = torch.bfloat16
    layers = [
        LayerCache(*(t.to(half) for t in (c.keys, c.values, c.key_blocks, c.value_blocks)))
        for c in step.context.layers
    ]
    for layer in layers:
        object.__setattr__(layer, "key_blocks", layer.keys.view(layer.key_blocks.shape))
        object.__setattr__(layer, "value_blocks", layer.values.view(layer.value_blocks.shape))
    step.context.attention._scratch = Scratch(half, torch.device("cpu"))
    context = TorchContext(layers, step.context.kv_slots, step.context.attention)
    output = context.attend(
        0, step.query.to(half), step.key.to(half), step.value.to(half), step.params
    )
    assert output.dtype == half
    torch.testing.assert_close(output.float(), step.expected, atol=0.05, rtol=0.05)
