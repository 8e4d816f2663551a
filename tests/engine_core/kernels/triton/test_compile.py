"""Every kernel compiles for an H100 or H200 (sm_90) and fits it, and others too, without a card.

Triton's compiler needs none; it is told what the card would say. Prints registers and shared
memory (pytest -s).
"""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip(
    "triton", reason="Triton is not installed; scripts/triton-tests brings it"
)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.helpers.meta_card import meta_model
from tests.helpers.patience import PATIENCE_S

from slipstream_core.attention import kv_cache
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import CacheSlots
from slipstream_core.attention.triton_backend import Launch, StepRows, TritonAttention
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.forward_ops import (
    Cached,
    activation_arguments,
    clamped_gate_arguments,
    combination_arguments,
    latent_arguments,
    margin_arguments,
    norm_arguments,
    order_arguments,
    rotation_arguments,
    route_arguments,
    two_norms_arguments,
)
from slipstream_core.forward.rope_patterns import NormForm, RopeForm
from slipstream_core.forward.row_products import (
    RowNorm,
    RowSum,
    expert_gates_arguments,
    expert_sums_arguments,
    row_product_arguments,
)
from slipstream_core.forward.trace import TRIALS
from slipstream_core.kernels.card import dependent_launch, forward_kernels, vocab_scan_kernels
from slipstream_core.kernels.card.dependent_launch import LATE, SOON, early
from slipstream_core.kernels.card.row_product_kernels import (
    expert_gates,
    expert_sums,
    row_product,
)
from slipstream_core.kernels.card.tiles import (
    H100_SHARED_LIMIT,
    Heads,
    Tile,
    shared_bytes,
)
from slipstream_core.kernels.card.triton_kernels import attend, combine, deal, store
from slipstream_core.kernels.card.vocab_scan_kernels import scan_slices
from slipstream_core.kernels.card.whole_vocab_kernels import redraw
from slipstream_core.sampling.whole_vocab_sampling import WholeVocabSampler
from slipstream_verify.gpu_check.gpu_report import GpuReport, read_rows
from slipstream_verify.gpu_check.kernels.compile_process import SMALL_LAYERS, jobs_of, with_early
from slipstream_verify.gpu_check.kernels.compile_target import TargetDriver, resources
from slipstream_verify.gpu_check.kernels.parallel_compile import compile_all
from slipstream_verify.gpu_check.models import ARCHITECTURES, small_config
from slipstream_verify.gpu_check.reference_cases import AttentionCase, make_scene
from slipstream_verify.gpu_check.sections import compiling, tiles
from slipstream_verify.gpu_check.setting import GpuSetting

FORWARD = [
    getattr(forward_kernels, name)
    for name in (
        "norm",
        "norm_two",
        "activate",
        "clamped_gate",
        "rotate",
        "latent_rows",
        "route",
        "route_by_margin",
        "order_experts",
        "combine_experts",
    )
]
FORWARD += [row_product, expert_gates, expert_sums]
EARLY_STEPS = ("launch_dependents", "wait")
SCANS = [
    getattr(vocab_scan_kernels, name)
    for name in (
        *("scan_slices", "join_slices", "scale_rows"),
        *("tops_of_groups", "bound_top", "top_of_slices", "join_top"),
    )
]


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled kernels that all tests share, also those of this run's other workers."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"


@pytest.fixture(autouse=True)
def for_sm90(monkeypatch: pytest.MonkeyPatch, kernel_cache: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernel_cache))
    set_active(TargetDriver(90))
    yield
    triton.runtime.driver._active = None


def set_active(driver: TargetDriver) -> None:
    """Kernels remember for which card they were compiled last."""
    triton.runtime.driver.set_active(driver)
    for kernel in (attend, combine, deal, store, *FORWARD, redraw, *SCANS):
        kernel.device_caches.clear()


def layer(
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> LayerGeometry:
    return LayerGeometry(heads, kv_heads, key_dim, value_dim or key_dim, window, softcap, sinks)


def latent(heads: int, rank: int = 512, rotated: int = 64) -> LayerGeometry:
    return LayerGeometry(heads, 1, rank + rotated, rank, None, None, False, True)


LAYERS = {
    "Llama 3.1 8B": layer(32, 8, 128),
    "Qwen3 0.6B": layer(16, 8, 128),
    "Qwen3 30B-A3B": layer(32, 4, 128),
    "GPT-OSS, window": layer(64, 8, 64, window=128, sinks=True),
    "Gemma 2 9B, window": layer(16, 8, 256, window=4096, softcap=50.0),
    "Gemma 2 9B": layer(16, 8, 256, softcap=50.0),
    "DeepSeek V3": layer(128, 128, 192, 128),
    "DeepSeek V3, latent": latent(128),
    "DeepSeek V2 Lite, latent": latent(16),
    "MiniCPM3, latent": latent(40, 256, 32),
    "Phi-3 mini": layer(32, 32, 96),
    "80 wide": layer(32, 32, 80),
    "StarCoder, one key head": layer(48, 1, 128),
    "one key head for 128": layer(128, 1, 256),
    "512 wide": layer(16, 2, 512),
    "small": layer(4, 2, 16),
}
CASES = [(torch.bfloat16, name) for name in LAYERS]
CASES += [(torch.float16, "Llama 3.1 8B")]
CASES += [(torch.float32, name) for name in ("Llama 3.1 8B", "Gemma 2 9B", "GPT-OSS, window")]
LONG = [pytest.mark.long]
QUICK = {"Llama 3.1 8B", "GPT-OSS, window", "Gemma 2 9B, window", "DeepSeek V3, latent"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(
            dtype,
            name,
            id=f"{name}, {str(dtype).removeprefix('torch.')}",
            marks=[] if dtype == torch.bfloat16 and name in QUICK else [pytest.mark.long],
        )
        for dtype, name in CASES
    ],
)
def test_fits(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    geometry = LAYERS[name]
    device = torch.device("cpu")
    layers = kv_cache.allocate([geometry], num_blocks=2, block_size=16, dtype=dtype, device=device)
    attention = TritonAttention(layers, block_size=16, device=device)
    launches = attention.every_launch(0, geometry, dtype)
    forms = {launch.compile().hash: launch for launch in launches}
    names = [launch.kernel.__name__ for launch in forms.values()]
    assert names.count("attend") == 3  # decode, and prefill, whole and split
    assert names.count("combine") == 2
    assert names.count("deal") == 2  # where the host knows how many rows decode, or not
    for launch in forms.values():
        used = resources(launch.compile(), tmp_path)
        tile = {n: launch.arguments.get(n) for n in ("DECODE", "SPLIT", "BLOCK_M", "BLOCK_N")}
        print(name, dtype, launch.kernel.__name__, tile, used)
        assert used["spills"] == 0, launch.kernel.__name__
        assert used["shared"] <= H100_SHARED_LIMIT, launch.kernel.__name__


def most_shared(launch: Launch, layer: LayerGeometry, dtype: torch.dtype) -> int:
    """What the arithmetic by which tiles are chosen says of it."""
    sizes: Any = [launch.arguments[name] for name in ("BLOCK_M", "BLOCK_N")]
    layout: Any = [launch.arguments[name] for name in ("num_warps", "num_stages")]
    heads = Heads(
        group=layer.num_heads // layer.num_kv_heads,
        key_dim=layer.key_dim,
        value_dim=layer.value_dim,
        itemsize=dtype.itemsize,
        is_latent=layer.is_latent,
    )
    return shared_bytes(Tile(*sizes, *layout), heads)


@pytest.mark.parametrize(
    "name",
    [
        "Gemma 2 9B",
        "one key head for 128",
        "DeepSeek V3",
        "DeepSeek V3, latent",
        "512 wide",
        "small",
    ],
)
@pytest.mark.parametrize(
    ("capability", "limit", "dtype"),
    [
        pytest.param(89, 101_376, torch.bfloat16, id="8.9"),
        pytest.param(89, 101_376, torch.float32, id="8.9, float32", marks=pytest.mark.long),
        pytest.param(80, 166_912, torch.bfloat16, id="8.0", marks=pytest.mark.long),
        pytest.param(120, 101_376, torch.bfloat16, id="12.0", marks=pytest.mark.long),
    ],
)
def test_fits_cards_with_less_shared_memory(
    capability: int, limit: int, dtype: torch.dtype, name: str
) -> None:
    set_active(TargetDriver(capability))
    geometry, device = LAYERS[name], torch.device("cpu")
    layers = kv_cache.allocate([geometry], num_blocks=2, block_size=16, dtype=dtype, device=device)
    attention = TritonAttention(layers, block_size=16, device=device, shared_bytes=limit)
    launches = [it for it in attention.every_launch(0, geometry, dtype) if it.kernel is attend]
    if most_shared(launches[0], geometry, dtype) > limit:
        pytest.skip("there are no tiles of it for this card")
    for launch in launches:
        shared = launch.compile().metadata.shared
        print(name, dtype, launch.arguments["DECODE"], launch.arguments["SPLIT"], shared)
        assert shared <= most_shared(launch, geometry, dtype) <= limit


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(each, id=f"{each // 10}.{each % 10}", marks=[] if each == 90 else LONG)
        for each in (80, 89, 90, 100, 120)
    ],
)
@pytest.mark.parametrize("vocab_size", [128256, 50257])
def test_sampling_fits(vocab_size: int, capability: int, tmp_path: Path) -> None:
    set_active(TargetDriver(capability))
    for dtype in (torch.float32, torch.bfloat16):
        for compiled in WholeVocabSampler().compile(vocab_size, torch.device("cpu"), dtype):
            used = resources(compiled, tmp_path)
            print(compiled.name, dtype, vocab_size, used)
            assert used["spills"] == 0, compiled.name
            assert used["shared"] <= 99 * 1024, compiled.name


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(each, id=f"{each // 10}.{each % 10}", marks=[] if each in (90, 120) else LONG)
        for each in (80, 89, 90, 100, 120)
    ],
)
def test_forwards_kernels_fit(capability: int, tmp_path: Path) -> None:
    set_active(TargetDriver(capability))
    kernels = {kernel.__name__: kernel for kernel in FORWARD}
    compiled = [
        (name, kernels[name].warmup(grid=(1,), **{**LATE, **arguments}))
        for name, arguments in every_argument(has_early=capability >= 90)
    ]
    for name, kernel in compiled:
        used = resources(kernel, tmp_path)
        assert used["spills"] == 0, (name, used)
        assert used["shared"] <= 2048, (name, used)


def test_a_kernel_that_starts_early_asks_for_weights_before_it_waits() -> None:
    for name, arguments in every_argument(has_early=True):
        if arguments.get("EARLY") is not True:
            continue
        kernel = {each.__name__: each for each in FORWARD}[name]
        code = kernel.warmup(grid=(1,), **arguments).asm["ptx"]
        launches, waits = (code.index(f"griddepcontrol.{it}") for it in EARLY_STEPS)
        stores = [match.start() for match in re.finditer(r"st\.global", code)]
        assert launches < waits < min(stores), name
        # weights alone are not to stay in a cache
        before = [line for line in code[:waits].splitlines() if "ld.global" in line]
        assert all("evict_first" in line for line in before), name
        assert bool(before) == (name == "row_product"), name


def test_every_kernel_waits_before_anything_else() -> None:
    """A program that returned before would let the next kernel start too soon."""
    for kernel in (attend, combine, deal, store, *FORWARD):
        if kernel is row_product:  # above
            continue
        [function] = ast.parse(kernel.src).body
        assert isinstance(function, ast.FunctionDef)
        _words, first, *_ = function.body
        assert ast.unparse(first) == "begin_early(EARLY)", function.name


def test_steps_of_few_tokens_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert early(device, 1) == LATE
    monkeypatch.setattr(dependent_launch, "_has_it", lambda _kind, _index: True)
    assert early(device, 32) == SOON
    assert early(device, 33) == LATE
    geometry = LAYERS["small"]
    layers = kv_cache.allocate(
        [geometry], num_blocks=2, block_size=16, dtype=torch.bfloat16, device=device
    )
    attention = TritonAttention(layers, block_size=16, device=device)
    launches = attention.every_launch(0, geometry, torch.bfloat16)
    forms: dict[bool, set[str]] = {True: set(), False: set()}
    for launch in launches:
        forms[is_early(launch)].add(launch.compile().hash)
    assert len(forms[True]) == len(forms[False]) == 8  # both are compiled when a model is loaded
    assert not forms[True] & forms[False]


def is_early(launch: Launch) -> bool:
    assert launch.arguments["EARLY"] == launch.arguments["launch_pdl"]
    return launch.arguments["EARLY"] is True


def every_argument(*, has_early: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kernels of forwards, with arguments as large models have them."""
    yield from row_products(has_early=has_early)

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    for num in (64, 1024, 2880, 8192, 16384):
        x, more, total, output = (half(1, 2, num) for _ in range(4))
        weight, other = half(num), half(num)
        for added in (None, more):
            for flags in ((False, True, False), (False, False, False), (False, False, True)):
                norm_of = (output, total, x, added, (weight, None), 1e-6, *flags)
                yield "norm", norm_arguments(*norm_of, 1.0, None)
        for factor, before in ((0.22, None), (1.0, other)):
            yield "norm", norm_arguments(*norm_of, factor, before)
        alone = norm_arguments(output, output, x, more, None, 1e-6, *flags, 1.0, other)
        yield "norm", alone
        for given in ((weight, other), (weight, None), (None, None)):
            centered = (output, total, x, more, given, 1e-5, True, False, False, 1.0, None)
            yield "norm", norm_arguments(*centered)
        outputs, both = (output, half(1, 2, num // 4)), (x, half(1, 2, num // 4))
        weights = (weight, half(num // 4))
        yield "norm_two", two_norms_arguments(outputs, both, weights, 1e-6, True, False)
    heads = half(1, 2, 4, 128)
    by_head = (heads, heads, heads, None, (half(128), None), 1e-6, False, True, False, 1.0, None)
    yield "norm", norm_arguments(*by_head)
    flags = True, False, False
    own = (heads, heads, heads, None, (half(4, 128), None), 1e-6, *flags, 1.0, None)
    yield "norm", norm_arguments(*own)
    output, gate, up, none = half(1, 2, 2880), half(1, 2, 2880), half(1, 2, 2880), (None,) * 4
    for activation in ("silu", "gelu", "tanh gelu"):
        yield "activate", activation_arguments(activation, output, gate, up, none)
    yield "activate", activation_arguments("new gelu", output, gate, None, none)
    yield "activate", activation_arguments("xielu", output, gate, None, [half(1)] * 4)
    experts_of = torch.empty(2, dtype=torch.int64)
    gated = clamped_gate_arguments(
        half(2, 2880), half(2, 5760), half(32, 5760), experts_of, 7.0, 1.702
    )
    yield "clamped_gate", gated
    for dim, width in ((64, 64), (128, 128), (96, 48), (256, 256)):
        both = [half(1, heads, 2, dim) for heads in (4, 2)]
        angles = [half(1, 2, width) for _ in range(2)]
        places = torch.empty(2, dtype=torch.int64)
        slots = CacheSlots(half(64, 2, dim), half(64, 2, dim), places)
        outputs, cached = [half(2, 4, dim), slots.keys], Cached(half(2, 2, dim), slots)
        for norm in (None, NormForm(1e-6, True, False), NormForm(1e-6, True, False, True)):
            weights = [None, None] if norm is None else [half(dim), half(dim)]
            for interleaved, by_pair, wide in ((False, False, False), (True, True, True)):
                form = RopeForm(width, interleaved, by_pair, wide)
                turning = outputs, both, weights, angles, form, norm
                yield "rotate", rotation_arguments(*turning, cached)
                if norm is None:
                    alone = ((each[0], None) for each in (outputs, both))
                    yield "rotate", rotation_arguments(*alone, *turning[2:])
        own, form = [half(heads, dim) for heads in (4, 2)], RopeForm(width, True, False, True)
        norm = NormForm(1e-5, False, False, center=True)
        yield "rotate", rotation_arguments(outputs, both, own, angles, form, norm, cached)
    for heads, rank, dim in ((128, 512, 64), (40, 256, 32)):
        angles = [half(1, 2, dim // 2) for _ in range(2)]
        parts = half(1, heads, 2, dim), half(1, 1, 2, dim), half(1, 2, rank), half(rank)
        rows = half(64, 1, rank + dim)
        slots = CacheSlots(rows, rows[..., :rank], places)
        for form in (RopeForm(dim, True, True, False, True), RopeForm(dim, True, True, True)):
            norm = NormForm(1e-6, True, False)
            queries = half(2, heads, rank + dim)
            yield "latent_rows", latent_arguments(queries, *parts, angles, form, norm, slots)
    for experts, chosen in ((8, 2), (128, 8), (256, 8), (32, 4)):
        ids = torch.empty((2, chosen), dtype=torch.int64)
        weights_of = half(2, chosen)
        for scores, weighs in (("softmax", "sum"), ("sigmoid", "sum"), ("logits", "softmax")):
            bias = half(experts) if scores == "sigmoid" else None
            form_of = RouteForm(chosen, scores, weighs, 1.0)
            forms = [form_of]
            if scores == "sigmoid" and experts == 256:
                forms.append(form_of._replace(num_groups=8, chosen_groups=4, best_of_group=2))
            for each in forms:
                yield "route", route_arguments(weights_of, ids, half(2, experts), bias, each)
        yield "route_by_margin", margin_arguments(half(2, 2), ids[:, :2], half(2, experts), 0.02)
        flat = [ids.view(-1) for _ in range(4)]
        yield "order_experts", order_arguments(flat, ids.view(-1).int(), ids)
        for added_bias in (None, half(experts, 2880)):
            rows, out = half(2 * chosen, 2880), half(2, 2880)
            for shared in (None, half(1, 2, 2880)):
                yield (
                    "combine_experts",
                    combination_arguments(
                        out, rows, weights_of, ids.view(-1), ids, added_bias, shared
                    ),
                )


def row_products(*, has_early: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Products of one row, and a norm, as they are launched; with has_early on such a card."""
    launched = SOON if has_early else LATE

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(1, dtype=torch.bfloat16).expand(shape)

    for n, k, gate in (
        (6144, 4096, None),
        (14336, 4096, "silu"),
        (4096, 14336, None),
        (3072, 1024, "gelu"),
        (9216, 2304, "tanh gelu"),
        (3584, 18944, None),
    ):
        weight = half(n if gate is None else 2 * n, k)
        norm = RowNorm(half(k), 1e-6, True, False)
        for normed, before in (
            (None, None),
            (norm, None),
            (norm._replace(kept=half(k)), None),
            (norm, RowSum(half(k), half(k))),
        ):
            for bias, more in ((None, None), (weight[:, 0], half(1, 1, n))):
                made = row_product_arguments(
                    half(1, 1, n), half(k), weight, bias, more, before, normed, gate
                )
                yield "row_product", made | launched
    for num_experts, chosen, hidden, inner in (
        (128, 8, 2048, 768),
        (256, 8, 7168, 2048),
        (64, 6, 2048, 1408),
        (8, 2, 4096, 14336),
    ):
        ids, weights = torch.zeros(1, chosen, dtype=torch.int64), half(1, chosen)
        up, down = half(num_experts, 2 * inner, hidden), half(num_experts, hidden, inner)
        x, middle = half(1, hidden), half(chosen, inner)
        gates = expert_gates_arguments(middle, x, ids, up, "silu")
        yield "expert_gates", gates | launched
        for shared in (None, half(1, 1, hidden)):
            sums = expert_sums_arguments(x, middle, weights, ids, down, shared)
            yield "expert_sums", sums | launched
    x, weight = half(1, 1, 4096), half(4096)
    flags = 1e-6, False, True, False, 1.0, None
    yield "norm", norm_arguments(x, x, x, x, (weight, None), *flags) | launched


STEPS: list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]] = [
    ((5,), ()),
    ((5, 16, 700), ((0, 1),)),
    ((), ((0, 1),)),
    ((9,) * 3, ((3, 200), (0, 17), (900, 2))),
    ((9,) * 300, ((1, 16),)),
]


def test_no_step_compiles_what_was_not_compiled_at_the_start() -> None:
    device = torch.device("cpu")
    known: set[str] = set()
    for decodes, chunks in STEPS:
        case = AttentionCase(name="", decodes=decodes, chunks=chunks, num_kv_heads=1, key_dim=16)
        scene = make_scene(case, device, torch.bfloat16)
        attention = TritonAttention([scene.layer], block_size=16, device=device)
        if not known:
            launches = attention.every_launch(0, case.geometry(), torch.bfloat16)
            known = {launch.compile().hash for launch in launches}
            assert len(known) == 8  # store, deal and combine twice, and three that attend
        rows = StepRows(
            scene.num_decodes,
            scene.kv_slots,
            torch.zeros(len(scene.kv_lens) + 1, dtype=torch.int32)[1:],  # in a packed buffer
            scene.slots,
            scene.block_tables,
            scene.query_starts,
        )
        _, launches = attention.context(rows).launches(
            0, scene.query, scene.key, scene.value, scene.params
        )
        assert {launch.compile().hash for launch in launches} <= known


def test_no_step_compiles_a_rotation_that_the_trial_did_not() -> None:
    """Of parts of a joined product, with one key head, whose strides say nothing for one token."""
    dim, heads = 72, 4

    def compiled(num_tokens: int) -> str:
        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype)

        joint = zeros(1, num_tokens, (heads + 2) * dim).split([heads * dim, dim, dim], -1)
        query, key, value = (part.view(1, num_tokens, -1, dim).transpose(1, 2) for part in joint)
        places = zeros(num_tokens + 1, dtype=torch.int64)[1:]  # in a packed buffer
        slots = CacheSlots(zeros(64, 1, dim), zeros(64, 1, dim), places)
        outputs, angles = [zeros(num_tokens, heads, dim), slots.keys], zeros(2, 1, num_tokens, dim)
        cached = Cached(value[0].transpose(0, 1), slots)
        form = RopeForm(dim, False, False, False)
        of_both = outputs, [query, key], [None, None]
        arguments = rotation_arguments(*of_both, [*angles], form, None, cached)
        kernel: Any = forward_kernels.rotate
        found: str = kernel.warmup(grid=(1,), **LATE, **arguments).hash
        return found

    known = {compiled(num_tokens) for num_tokens in TRIALS}
    assert {compiled(num_tokens) for num_tokens in (2, 5, 16, 17, 33, 64)} <= known


# ---- gpu-check's compiling in parallel ---------------------------------------------------------


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GpuSetting:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    report = GpuReport("compiling", tmp_path / "rows", 0.0)
    return GpuSetting("cpu", True, tmp_path, time.monotonic() + 5 * PATIENCE_S, report)


def test_a_sweeps_kernels_are_compiled_by_several_processes(setting: GpuSetting) -> None:
    tiles.run(setting)
    *of_tiles, compiled = read_rows(setting.report.path)
    assert len({row["case"] for row in of_tiles}) == 4 == compiled["num_tiles"]
    for row in of_tiles:
        assert row["error"] is None
        assert row["spilled_bytes"] == 0
        assert 0 < row["registers"] <= 255


def test_what_was_compiled_elsewhere_is_found_in_the_cache(setting: GpuSetting) -> None:
    """By a process that is told to compile for the same card."""
    compiling.run_models(setting)
    [row] = read_rows(setting.report.path)
    assert row["ok"] is True
    assert row["num_jobs"] == 3
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    before = set(folder.rglob("*.cubin"))
    assert before
    layer = LAYERS["Llama 3.1 8B"]
    device = torch.device("cpu")
    layers = kv_cache.allocate(
        [layer], num_blocks=2, block_size=16, dtype=torch.bfloat16, device=device
    )
    for launch in TritonAttention(layers, block_size=16, device=device).every_launch(
        0, layer, torch.bfloat16
    ):
        launch.compile()
    assert set(folder.rglob("*.cubin")) == before


@pytest.mark.parametrize(("which", "vocabs"), [("exactness", {331}), ("models", {151936, 128256})])
def test_what_samples_is_compiled_ahead(which: str, vocabs: set[int]) -> None:
    jobs = list(jobs_of(which, H100_SHARED_LIMIT, is_quick=False))
    assert len({job.name for job in jobs}) == len(jobs)
    launches = [job.launches()[0] for job in jobs if job.name.startswith("sampling")]
    assert {it.arguments["vocab_size"] for it in launches if "vocab_size" in it.arguments} == vocabs
    kernels = {it.kernel.__name__ for it in launches}
    assert kernels == {"redraw", *(kernel.__name__ for kernel in SCANS)}
    edits = {it.arguments["EDITS"] for it in launches if it.kernel is scan_slices}
    assert edits == {True, False}


def test_what_starts_early_is_compiled_ahead_for_cards_that_have_it() -> None:
    jobs = list(jobs_of("models", H100_SHARED_LIMIT, is_quick=False))
    for job in (jobs[0], jobs[-1]):
        launches = job.launches()
        assert with_early(job, launches, 89) == launches
        added = with_early(job, launches, 90)[len(launches) :]
        samples = job.name.startswith("sampling")
        assert {it.arguments["EARLY"] for it in added} == (set() if samples else {True})
    # of tiles, for cases that have few rows
    tiles = jobs_of("tiles", H100_SHARED_LIMIT, is_quick=False)
    of_few = {job.name.partition(":")[0] for job in tiles if job.is_early}
    assert of_few == {"decode, 32 heads, 8 of keys"}


def test_the_layers_of_small_models_are_known() -> None:
    layers = {each for name in ARCHITECTURES for each in meta_model(small_config(name)).geometry}
    assert layers == set(SMALL_LAYERS)


def test_compiling_ends_with_its_time(setting: GpuSetting) -> None:
    late = replace(setting, deadline_s=0.0)
    assert compile_all(late, "models") == []
    [row] = read_rows(setting.report.path)
    assert row["skipped"] == "out of time: 2 of 2 processes had more to compile"
