"""Attention by Triton's kernels against float64: by Triton's interpreter, or on a card.

scripts/triton-tests runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl

from slipstream_core.attention import kv_cache
from slipstream_core.attention.backend_choice import triton_attention
from slipstream_core.attention.triton_backend import StepRows, TritonAttention
from slipstream_core.kernels.card import triton_kernels
from slipstream_verify.gpu_check.reference_cases import (
    LIMITS,
    AttentionCase,
    Scene,
    attention_cases,
    check_case,
    make_scene,
    relative_error,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

ROUNDED = {"decode", "padded rows", "group of 7", "all at once", "split, window and sinks"}
ROUNDED |= {"dims 80 and 80", "dims 192 and 128", "latents"}


@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", attention_cases(long=not IS_INTERPRETED), ids=lambda c: c.name)
def test_equals_float64(case: AttentionCase, dtype: torch.dtype) -> None:
    if IS_INTERPRETED and dtype != torch.float32 and case.name not in ROUNDED:
        pytest.skip("the interpreter takes a second for each; a card runs them all")
    error = check_case(case, DEVICE, dtype)
    print(f"{error:.1e}")
    assert error < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_heads_of_512(dtype: torch.dtype) -> None:
    """As of Gemma 4's layers without a window."""
    case = AttentionCase(
        name="", key_dim=512, value_dim=512, decodes=(1, 70), chunks=((0, 19), (20, 7)), group=4
    )
    assert check_case(case, DEVICE, dtype) < LIMITS[dtype]


CASES = st.builds(
    AttentionCase,
    name=st.just("drawn"),
    decodes=st.lists(st.integers(0, 70), max_size=3).map(tuple),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=2).map(tuple),
    num_kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3, 16]),
    key_dim=st.sampled_from([8, 16, 24]),
    value_dim=st.sampled_from([8, 16, 24]),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, None, 1, 7, 50]),
    softcap=st.sampled_from([None, None, 3.0]),
    sinks=st.booleans(),
    spare_width=st.sampled_from([0, 7, 20]),
    seed=st.integers(0, 1000),
).filter(lambda case: bool(case.decodes or case.chunks))


@given(CASES)
@settings(deadline=None, max_examples=15)
def test_whatever_the_step(case: AttentionCase) -> None:
    assert check_case(case, DEVICE, torch.float32) < LIMITS[torch.float32]


@given(CASES, st.sampled_from([8, 16, 24]))
@settings(deadline=None, max_examples=5)
def test_whatever_the_step_of_latents(case: AttentionCase, rotated: int) -> None:
    latent = replace(case, num_kv_heads=1, key_dim=case.value_dim + rotated, is_latent=True)
    assert check_case(latent, DEVICE, torch.float32) < LIMITS[torch.float32]


def rows_of(scene: Scene) -> StepRows:
    return StepRows(
        scene.num_decodes,
        scene.kv_slots,
        scene.kv_lens,
        scene.slots,
        scene.block_tables,
        scene.query_starts if scene.num_decodes < len(scene.kv_lens) else None,
    )


def test_tensors_may_lie_in_memory_as_models_hand_them_over() -> None:
    """Heads first; one token, whose strides say nothing; parts of a joint projection."""
    for decodes in ((20, 7), (20,)):
        case = AttentionCase(name="", decodes=decodes, num_kv_heads=2, group=2)
        scene = make_scene(case, DEVICE, torch.float32)
        attention = TritonAttention([scene.layer], block_size=16, device=DEVICE)
        plain = scene.query, scene.key, scene.value
        heads_first = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in plain)
        joint = torch.cat(plain, 1).split([t.shape[1] for t in plain], 1)
        across = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in plain)
        for tensors in (heads_first, joint, across):
            context = attention.context(rows_of(scene))
            output = context.attend(0, *tensors, scene.params)
            assert output.is_contiguous()
            assert relative_error(output, scene.expected) < 1e-4


@pytest.mark.parametrize("is_latent", [False, True])
def test_keys_that_are_stored_already_are_attended_to(is_latent: bool) -> None:
    """By decode rows and prefill rows, as behind a kernel that stores what it makes."""
    case = AttentionCase(name="", decodes=(20, 7), chunks=((0, 9), (40, 3)))
    if is_latent:
        case = replace(case, num_kv_heads=1, key_dim=48, value_dim=32, is_latent=True)
    scene = make_scene(case, DEVICE, torch.float32)
    attention = TritonAttention([scene.layer], block_size=16, device=DEVICE)
    context = attention.context(rows_of(scene))
    slots = context.cache_slots(0)
    assert (slots.keys, slots.values) == (scene.layer.keys, scene.layer.values)
    scene.layer.store(slots.kv_slots, scene.key, scene.value)
    scene.key.fill_(torch.nan)
    output = context.attend_stored(0, scene.query, scene.params)
    assert relative_error(output, scene.expected) < 1e-4
    _, launches = context.launches(0, scene.query, None, None, scene.params)
    assert all(launch.kernel is not triton_kernels.store for launch in launches)


def test_launches_made_once_serve_other_rows() -> None:
    """As a CUDA graph replays them: same tensors, grids and splits, other lengths and blocks."""
    big = AttentionCase(name="", decodes=(300, 1, 40, 64), num_kv_heads=1, spare_width=3)
    fixed = make_scene(big, DEVICE, torch.float32)
    attention = TritonAttention([fixed.layer], block_size=16, device=DEVICE)
    output, launches = attention.context(rows_of(fixed)).launches(
        0, fixed.query, fixed.key, fixed.value, fixed.params
    )
    assert len(launches) == 4, "store, deal, attend, combine"
    for seed, decodes in enumerate([(300, 1, 40, 64), (5, 200, 0, 0), (0, 0, 0, 0), (17, 16, 15)]):
        lens = (*decodes, *[0] * (4 - len(decodes)))
        small = AttentionCase(name="", decodes=lens, num_kv_heads=1, seed=seed)
        scene = make_scene(small, DEVICE, torch.float32)
        for part in ("kv_slots", "kv_lens", "query", "key", "value"):
            getattr(fixed, part).copy_(getattr(scene, part))
        fixed.block_tables.fill_(0)
        width = scene.block_tables.shape[1]
        fixed.block_tables[:, :width].copy_(scene.block_tables)
        fixed.layer.keys.fill_(torch.nan)
        fixed.layer.values.fill_(torch.nan)
        size = min(len(fixed.layer.keys), len(scene.layer.keys))
        assert int(scene.kv_slots.max()) < size
        fixed.layer.keys[:size] = scene.layer.keys[:size]
        fixed.layer.values[:size] = scene.layer.values[:size]
        output.fill_(torch.nan)
        for launch in launches:
            launch.run()
        assert relative_error(output, scene.expected) < 1e-4, lens


def dealt(
    lens: list[int], *, budget: int, window: int = 0, decodes: int | None = None
) -> tuple[int, list[list[int]]]:
    """The tiles of 16 keys to an item, and each row's items."""
    num_rows = len(lens)
    num_items = num_rows + budget
    work = torch.full((2 + num_rows + num_items,), 99, dtype=torch.int32, device=DEVICE)
    triton_kernels.deal[(num_rows,)](
        work,
        torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        None if decodes is None else torch.tensor([decodes], dtype=torch.int32, device=DEVICE),
        num_rows,
        num_items,
        budget,
        WINDOW=window,
        BLOCK_N=16,
        COUNTED=decodes is not None,
    )
    share, *firsts = work[: 2 + num_rows].tolist()
    rows = work[2 + num_rows :].tolist()
    assert rows[firsts[-1] :] == [-1] * (num_items - firsts[-1])
    items = [list(range(*firsts[row : row + 2])) for row in range(num_rows)]
    assert [row for row in range(num_rows) for _ in items[row]] == rows[: firsts[-1]]
    return share, items


@given(
    lens=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    budget=st.integers(1, 40),
    window=st.sampled_from([0, 1, 40, 700]),
    hidden=st.integers(0, 3),
)
@settings(deadline=None, max_examples=15)
def test_keys_are_dealt_out_by_what_there_is(
    lens: list[int], budget: int, window: int, hidden: int
) -> None:
    decodes = max(0, len(lens) - hidden)
    share, items = dealt(lens, budget=budget, window=window, decodes=decodes)
    tiles = []
    for num in lens[:decodes]:
        low = max(num - window, 0) // 16 * 16 if window else 0
        tiles.append(-(-(num - low) // 16))
    assert share == max(1, -(-sum(tiles) // budget))
    assert [len(each) for each in items[:decodes]] == [max(1, -(-it // share)) for it in tiles]
    assert all(not each for each in items[decodes:])


def test_one_long_row_among_short_ones_is_read_by_many() -> None:
    """And the short ones by no more than they need."""
    _, items = dealt([*[300] * 20, 100_000, *[300] * 11], budget=33)
    assert len(items[20]) > 28
    assert {len(each) for row, each in enumerate(items) if row != 20} == {1}


@pytest.mark.skipif(not IS_INTERPRETED, reason="a compiled kernel looks at 1,024 rows at once")
def test_more_rows_and_items_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "AT_ONCE", tl.constexpr(4))
    lens = [160, 16, 0, 160, 16, 3200, 1, 160, 160]
    _, items = dealt(lens, budget=243)
    assert [len(each) for each in items] == [10, 1, 1, 10, 1, 200, 1, 10, 10]


@pytest.mark.parametrize("decodes", [(), (1, 45), (700, 3, 90)], ids=str)
@pytest.mark.parametrize("chunks", [((0, 5), (30, 21)), ((500, 9),)], ids=str)
@pytest.mark.parametrize("spare", [0, 3])
def test_rows_that_are_counted_on_the_device(
    decodes: tuple[int, ...], chunks: tuple[tuple[int, int], ...], spare: int
) -> None:
    """As in a recorded step: padded to its most rows and tokens, any of which may decode."""
    case = AttentionCase(name="", decodes=decodes, chunks=chunks, num_kv_heads=1, window=None)
    scene = make_scene(case, DEVICE, torch.float32)
    num, tokens = len(scene.kv_lens), len(scene.query)
    size, most = tokens + 5 * spare, num + spare

    def padded(tensor: torch.Tensor, length: int, value: int = 0) -> torch.Tensor:
        more = tensor.new_full((length - len(tensor), *tensor.shape[1:]), value)
        return torch.cat([tensor, more])

    rows = StepRows(
        most,
        padded(scene.kv_slots, size),
        padded(scene.kv_lens, most + 1),
        padded(scene.slots, most + 1),
        scene.block_tables,
        padded(scene.query_starts, most + 2, size),
        torch.tensor([scene.num_decodes], dtype=torch.int32, device=DEVICE),
        len(chunks) + 1,
    )
    attention = TritonAttention([scene.layer], block_size=16, device=DEVICE)
    given = (padded(tensor, size) for tensor in (scene.query, scene.key, scene.value))
    output = attention.context(rows).attend(0, *given, scene.params)
    assert relative_error(output[:tokens], scene.expected) < 1e-4
    assert (output[tokens:] == 0).all()


def test_what_is_launched_hangs_on_nothing_that_is_on_the_device() -> None:
    """Tensors on the meta device have no content to look at."""
    case = AttentionCase(name="", decodes=(30, 2), chunks=((0, 9), (40, 3)), sinks=True)
    scene = make_scene(case, DEVICE, torch.float32)
    meta: dict[str, Any] = {
        name: getattr(scene, name).to("meta")
        for name in (
            "query_starts",
            "kv_lens",
            "slots",
            "block_tables",
            "kv_slots",
            "query",
            "key",
            "value",
        )
    }
    tensors = ("keys", "values", "key_blocks", "value_blocks")
    layer = kv_cache.LayerCache(*(getattr(scene.layer, name).to("meta") for name in tensors))
    launches = []
    for cache, there in ((layer, meta), (scene.layer, {n: getattr(scene, n) for n in meta})):
        attention = TritonAttention([cache], block_size=16, device=DEVICE)
        rows = StepRows(
            scene.num_decodes,
            there["kv_slots"],
            there["kv_lens"],
            there["slots"],
            there["block_tables"],
            there["query_starts"],
        )
        _, made = attention.context(rows).launches(
            0, there["query"], there["key"], there["value"], scene.params
        )
        launches.append([(launch.kernel, launch.grid) for launch in made])
    assert launches[0] == launches[1]


def test_what_steps_do_not_change_is_put_together_once_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = AttentionCase(name="", decodes=(30, 2), chunks=((0, 9), (40, 3)), window=8)
    scene = make_scene(case, DEVICE, torch.float32)
    attention = TritonAttention([scene.layer] * 3, block_size=16, device=DEVICE)
    made = []
    new_form = attention._new_form
    monkeypatch.setattr(attention, "_new_form", lambda key: made.append(key) or new_form(key))
    tensors = scene.query, scene.key, scene.value
    whole = scene.params._replace(window=None)  # of the last layer, which has no window

    def step() -> list[tuple[tuple[int, ...], set[str]]]:
        context = attention.context(rows_of(scene))
        launches = []
        for layer, params in enumerate((scene.params, scene.params, whole)):
            launches += context.launches(layer, *tensors, params)[1]
        return [(launch.grid, set(launch.arguments)) for launch in launches]

    first = step()
    assert [key.layer for key in made] == [0, 1, 2]
    assert all(step() == first for _ in range(3))
    assert len(made) == 3


def test_a_model_with_larger_heads_is_left_to_torch() -> None:
    def chosen(**shape: int) -> TritonAttention | None:
        geometry = AttentionCase(name="", **shape).geometry()
        layers = kv_cache.allocate(
            [geometry], num_blocks=2, block_size=4, dtype=torch.float32, device=DEVICE
        )
        return triton_attention(
            [geometry], layers, block_size=4, dtype=torch.float32, device=DEVICE, model="it"
        )

    assert chosen(key_dim=512) is not None
    assert chosen(key_dim=513) is None
    assert chosen(group=129, num_kv_heads=1) is None
