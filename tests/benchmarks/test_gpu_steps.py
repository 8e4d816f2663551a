"""What gpu-check's sections share: plans of single steps, their work, kernels, loops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream_lab.common.bare_loop import LoopRequest, new_scheduler
from slipstream_verify.gpu_check.bounds import Ceilings, ForwardWork, step_work
from slipstream_verify.gpu_check.gpu_report import GpuReport, headline, read_rows, write_files
from slipstream_verify.gpu_check.kernel_census import (
    KernelUse,
    counted,
    per_run,
    profiled,
    short_name,
)
from slipstream_verify.gpu_check.load_client import ClientLoad, lengths_of
from slipstream_verify.gpu_check.sections.census import _Census
from slipstream_verify.gpu_check.sections.steady import bounds_of, loop_shape
from slipstream_verify.gpu_check.setting import GpuSetting
from slipstream_verify.gpu_check.step_plans import plan_of, plan_of_draws, why_not_cached

BLOCK = 16
VOCAB = 40
DENSE = ForwardWork(
    dense=10**6,
    output=10**5,
    experts=0,
    num_experts=1,
    experts_per_token=1,
    attention_dims=64,
)


def runner(num_blocks: int = 1000) -> Any:
    return SimpleNamespace(
        num_blocks=num_blocks,
        info=SimpleNamespace(block_size=BLOCK, block_bytes=1600, vocab_size=VOCAB),
    )


DECODES = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=4)
CHUNKS = st.lists(st.tuples(st.integers(0, 70), st.integers(2, 50)), max_size=3)


@given(DECODES, CHUNKS)
def test_a_plan_writes_each_token_to_its_place_in_its_rows_blocks(
    decodes: list[tuple[int, int]], chunks: list[tuple[int, int]]
) -> None:
    rows = [*decodes, *chunks]
    if not rows:
        return
    plan = plan_of(runner(), rows)
    assert plan.num_decodes == len(decodes)
    assert plan.num_requests == len(rows)
    at = 0
    taken: set[int] = set()
    for row, (before, now) in enumerate(rows):
        mine = plan.table_slots == row
        table = plan.table_blocks[mine]
        assert plan.table_numbers[mine].tolist() == list(range(-(-(before + now) // BLOCK)))
        assert 0 not in table
        assert not taken & set(table.tolist())
        taken |= set(table.tolist())
        for position in range(before, before + now):
            assert plan.positions[at] == position
            assert plan.kv_slots[at] == table[position // BLOCK] * BLOCK + position % BLOCK
            at += 1
        assert plan.kv_lens[row] == before + now
        assert plan.query_lens[row] == now
    assert at == plan.num_tokens


def test_a_step_that_the_cache_does_not_hold_is_skipped_with_its_sizes(tmp_path: Path) -> None:
    """As 256 rows of Qwen3-30B-A3B on a card of 80 GiB."""
    gib = SimpleNamespace(block_size=BLOCK, block_bytes=48 * 4 * 128 * 2 * 2 * BLOCK)
    qwen: Any = SimpleNamespace(num_blocks=12_001, info=gib)  # 17.6 GiB
    assert why_not_cached(qwen, [BLOCK] * 12_000) is None
    assert why_not_cached(qwen, [BLOCK] * 11_999 + [BLOCK + 1]) is not None
    report = GpuReport("census", tmp_path / "rows.jsonl", 0.0)
    setting = GpuSetting("cuda", False, tmp_path, float("inf"), report)
    limits = Ceilings(1e12, 1e14)
    _Census(setting, "qwen3-30b-a3b", qwen, DENSE, limits).launched(
        "decode of 256", [(1023, 1)] * 256
    )
    [row] = read_rows(report.path)
    assert row["skipped"] == "needs 24.0 GiB of cache, there are 17.6"


@pytest.mark.parametrize(
    "limits",
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 2}],
    ids=str,
)
def test_draws_are_planned_as_a_scheduler_plans_them(limits: dict[str, Any]) -> None:
    wanted = LoopRequest(np.zeros(1, np.uint32), 1, **{"temperature": 0.7, **limits})
    requests = [replace(wanted, seed=seed) for seed in range(5, 9)]
    scheduler = new_scheduler(requests, num_blocks=9, block_size=16, budget=4, max_model_len=16)
    expected = scheduler.schedule(np.zeros(4, np.int64))
    assert expected is not None
    plan = plan_of_draws(np.arange(5, 9), wanted)
    for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "kv_lens", "samples"):
        assert getattr(plan, name).dtype == getattr(expected, name).dtype
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name))
    for name in ("all_greedy", "any_truncation", "max_logprobs"):
        assert getattr(plan, name) == getattr(expected, name)


def test_a_plans_inputs_are_not_alike() -> None:
    """Experts are chosen by them."""
    token_ids = plan_of(runner(), [(9, 1), (0, 300)]).token_ids
    assert set(token_ids.tolist()) == set(range(VOCAB))


def test_rows_share_blocks_where_the_cache_is_smaller() -> None:
    plan = plan_of(runner(num_blocks=4), [(40, 1), (40, 1)])
    assert set(plan.table_blocks.tolist()) == {1, 2, 3}


def test_a_steps_work_is_its_weights_its_cache_and_its_operations() -> None:
    info = runner().info
    work = step_work(info, DENSE, [(9, 1), (9, 1), (4, 3)], 2)
    assert work.num_bytes == 1.1e6 * 2 + (10 + 10 + 7) * 100
    attention = 4 * 64 * (10 + 10 + 5 + 6 + 7)
    assert work.flops == 2 * (10**6 * 5 + 10**5 * 3) + attention
    assert work.bound_s(Ceilings(1e6, 1e12)) == work.num_bytes / 1e6
    assert work.bound_s(Ceilings(1e12, 1e6)) == work.flops / 1e6


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void at::native::(anonymous namespace)::cat_kernel<float, 4>(float*, int)",
            "cat_kernel<float, 4>",
        ),
        ("attend", "attend"),
        ("void f<void (*)(int)>(int)", "f<void (*)(int)>"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("x" * 500, "x" * 120),
    ],
)
def test_a_kernels_name_is_shown_without_its_arguments(name: str, short: str) -> None:
    assert short_name(name) == short


def test_kernels_are_counted_by_name() -> None:
    assert counted([("f(int)", 2.0), ("g", 5.0), ("f(float)", 1.5)]) == [
        KernelUse("g", 1, 5.0),
        KernelUse("f", 2, 3.5),
    ]


def test_what_two_profiles_share_belongs_to_no_run() -> None:
    fewer = [KernelUse("step", 4, 8.0), KernelUse("copy", 3, 9.0)]
    more = [KernelUse("step", 14, 30.0), KernelUse("copy", 3, 10.0), KernelUse("new", 5, 1.0)]
    assert per_run(more, fewer, 5) == [KernelUse("step", 2, 4.4), KernelUse("new", 1, 0.2)]


def test_the_profiler_sees_operators_but_not_those_within_others() -> None:
    x = torch.ones(8, 8)

    def work() -> None:
        for _ in range(3):
            torch.matmul(x, x)
        x.relu()

    uses = {use.name: use.count for use in profiled("cpu", work)}
    assert uses["aten::matmul"] == 3
    assert uses["aten::relu"] == 1
    assert "aten::mm" not in uses


def test_what_a_run_is_read_by_are_its_shares_of_the_bound(tmp_path: Path) -> None:
    report = GpuReport("decode", tmp_path / "rows", 0.0)
    report.add("model", weights_gb=1.0)
    report.add("batch 1", True, share_of_bound=0.5, goal_share=0.9, meets_goal=False)
    rows = read_rows(report.path)
    assert headline(rows) == [
        {
            "section": "decode",
            "case": "batch 1",
            "share_of_bound": 0.5,
            "goal_share": 0.9,
            "meets_goal": False,
        }
    ]
    _, table = write_files(tmp_path, "name", rows)
    lines = table.read_text().splitlines()
    assert lines.index("| decode | batch 1 | 0.5 | 0.9 | False |") < lines.index("## decode")


# ---- a closed loop -----------------------------------------------------------------------------


def test_a_loads_lengths_are_drawn_within_its_spread() -> None:
    load = ClientLoad(num=500, prompt_len=40, num_tokens=80, vocab_size=9, spread=0.25)
    prompts, tokens = lengths_of(load)
    assert lengths_of(load) == (prompts, tokens)
    assert (min(prompts), max(prompts)) == (10, 40)
    assert (min(tokens), max(tokens)) == (20, 80)
    assert lengths_of(ClientLoad(num=2, prompt_len=4, num_tokens=8, vocab_size=9)) == (
        [4, 4],
        [8, 8],
    )


def test_the_average_step_of_a_loop_is_that_of_playing_it() -> None:
    rng = np.random.default_rng(0)
    prompts, tokens = rng.integers(5, 50, 4000), rng.integers(10, 100, 4000)
    shape = loop_shape(prompts.tolist(), tokens.tolist(), 8)
    requests = iter(zip(prompts.tolist(), tokens.tolist(), strict=True))
    rows = [(p, n, 0) for p, n in (next(requests) for _ in range(8))]
    contexts, computed, num_steps = [], 0, 3000
    for _ in range(num_steps):
        for at, (prompt, num, done) in enumerate(rows):
            contexts.append(prompt + done)
            rows[at] = (prompt, num, done + 1)
            if done + 1 == num:
                rows[at] = (*next(requests), 0)
                computed += rows[at][0]
    assert shape.context == pytest.approx(np.mean(contexts), rel=0.05)
    assert shape.prompt_tokens == pytest.approx(computed / num_steps, rel=0.05)


def test_prompts_cost_a_loop_only_what_the_weights_reading_does_not_hide() -> None:
    info, limits = runner().info, Ceilings(1e9, 1e15)
    shape = loop_shape([100], [100], 4)
    alone, together = bounds_of(info, DENSE, shape, 4, 2, limits)
    assert together == pytest.approx(alone, rel=0.02)  # bytes decide, and a prompt's are few
    slow = Ceilings(1e15, 1e9)
    alone, together = bounds_of(info, DENSE, shape, 4, 2, slow)
    assert together == pytest.approx(2 * alone, rel=0.1)  # as many tokens of prompts as of rows
