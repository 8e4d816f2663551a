"""The kernels of mixers against the definitions of what they compute, token by token."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.states.flat_step import FlatStep
from slipstream_core.states.state_cache import MixerStates, StateShape
from slipstream_core.states.state_pool import StatePool

FOUND: Any = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")

NUM_SLOTS, NUM_SNAPSHOTS = 6, 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)


def pool_of(shape: tuple[int, ...]) -> StatePool:
    states = MixerStates({}, {0: StateShape(shape, torch.float32)})
    pool = StatePool({0: states}, NUM_SLOTS, torch.device("cpu"), num_snapshots=NUM_SNAPSHOTS)
    pool.states[0].normal_()
    return pool


class Rows:
    """Rows of a step, in slots of no order; some begin, and chunks save their states."""

    def __init__(self, lens: list[int], seed: int) -> None:
        rng = random.Random(seed)
        self.lens = np.array(lens, np.int32)
        self.slots = np.array(rng.sample(range(NUM_SLOTS), len(lens)))
        self.starts = np.array([rng.choice([0, 3]) for _ in lens], np.int32)
        self.prompt_lens = self.starts + [rng.randrange(length + 2) for length in lens]
        self.saves = {}
        snapshots = iter(range(NUM_SNAPSHOTS))
        for row, length in enumerate(lens):
            if length > 1:
                marks = sorted(rng.sample(range(1, length + 1), min(2, length)))
                self.saves[row] = list(zip(marks, snapshots, strict=False))

    def step(self, pool: StatePool) -> FlatStep:
        return FlatStep(
            FOUND,
            pool,
            slots=self.slots,
            query_lens=self.lens,
            starts=self.starts,
            prompt_lens=self.prompt_lens,
            saves=self.saves,
        )

    def begun(self, pool: StatePool, row: int) -> torch.Tensor:
        """The state that a row begins with."""
        state = pool.states[0][self.slots[row]].clone()
        return state if self.starts[row] else torch.zeros_like(state)


def singly(rows: Rows, pool: StatePool, compute: Any) -> torch.Tensor:
    """The outputs of all tokens, each computed in a step of its own."""
    outputs = []
    first = 0
    for row, length in enumerate(rows.lens.tolist()):
        for at in range(length):
            step = FlatStep(
                FOUND,
                pool,
                slots=rows.slots[row : row + 1],
                query_lens=np.ones(1, np.int32),
                starts=rows.starts[row : row + 1] + at,
                prompt_lens=rows.prompt_lens[row : row + 1],
            )
            outputs.append(compute(step, slice(first + at, first + at + 1)))
        first += length
    return torch.cat(outputs)


LENS = [[1], [1, 1, 1, 5], [7, 2], [1, 40, 3]]


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize(("channels", "taps"), [(5, 4), (700, 3), (512, 1)])
@pytest.mark.parametrize("full", [False, True])
def test_convolve(lens: list[int], channels: int, taps: int, full: bool) -> None:
    rows, pool = Rows(lens, seed=channels), pool_of((channels, taps))
    num_tokens = sum(lens)
    x = torch.randn(1, num_tokens, channels + 3)[..., :channels]  # of a wider product
    weight = torch.randn(taps, channels)
    bias = torch.randn(channels) if full else None
    before = [rows.begun(pool, row) for row in range(len(lens))]
    copy = pool_of((channels, taps))
    copy.states[0].copy_(pool.states[0])
    output = rows.step(pool).convolve(x, weight, bias, 0, full)[0]
    first = 0
    for row, length in enumerate(lens):
        past = before[row][: (taps - 1) * channels].view(taps - 1, channels)
        inputs = torch.cat([past, x[0, first : first + length]])
        expected = torch.stack(
            [(inputs[at : at + taps] * weight).sum(0) for at in range(length)]
        ) + (0 if bias is None else bias)
        expected = silu(expected) if full else expected
        torch.testing.assert_close(output[first : first + length], expected)
        kept = {length: int(rows.slots[row])}
        marks = {done: NUM_SLOTS + snapshot for done, snapshot in rows.saves.get(row, ())}
        for done, slot in (*kept.items(), *marks.items()):
            state = pool.states[0][slot][: (taps - 1) * channels].view(taps - 1, channels)
            assert torch.equal(state, inputs[done : done + taps - 1])
        first += length
    alone = singly(rows, copy, lambda step, at: step.convolve(x[:, at], weight, bias, 0, full)[0])
    assert torch.equal(alone, output)


def rule(
    state: torch.Tensor, token: dict[str, torch.Tensor], *, is_delta: bool, normed: bool
) -> torch.Tensor:
    """One token of all heads, in float64; changes the state [heads, key_dim, value_dim]."""
    heads = state.shape[0]
    query, key = (
        token[name].double().repeat_interleave(heads // token[name].shape[0], 0)
        for name in ("query", "key")
    )
    if normed:
        query, key = (
            each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key)
        )
    decay = token["decay"].double().exp()
    state *= decay.view(heads, -1, 1)
    change = token["value"].double()
    if is_delta:
        change = change - (state * key[..., None]).sum(1)
    if "strength" in token:
        change = change * token["strength"].double()[:, None]
    state += key[..., None] * change[:, None]
    return (state * 0.5 * query[..., None]).sum(1)


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [(1, 2, 16, 16), (2, 4, 24, 70), (3, 3, 128, 64), (1, 1, 5, 3), (1, 70, 16, 1)],
)
@pytest.mark.parametrize("form", ["delta", "delta by key", "mamba", "limited", "by rates"])
def test_recur(
    lens: list[int], key_heads: int, heads: int, key_dim: int, value_dim: int, form: str
) -> None:
    is_delta = form.startswith("delta")
    rows, pool = Rows(lens, seed=heads), pool_of((heads, key_dim, value_dim))
    num_tokens = sum(lens)
    given = {
        "query": torch.randn(num_tokens, key_heads, key_dim),
        "key": torch.randn(num_tokens, key_heads, key_dim),
        "value": torch.randn(num_tokens, heads, value_dim),
        "decay": -torch.rand(num_tokens, heads, *([key_dim] if form == "delta by key" else [])),
        "strength": torch.rand(num_tokens, heads + 1)[:, :heads],  # of a wider product
    }
    if form == "delta by key":
        del given["strength"]
    skip = None if is_delta else torch.randn(heads)
    rates: torch.Tensor | None = None
    if form == "limited":
        rates = -torch.rand(heads)
        given["decay"] = rates * given["strength"]
    elif form == "by rates":
        rates = -torch.rand(heads, key_dim)
        del given["decay"]
    least, most = 0.3, 0.6
    copy = pool_of((heads, key_dim, value_dim))
    copy.states[0].copy_(pool.states[0])
    before = [rows.begun(pool, row).view(heads, key_dim, value_dim) for row in range(len(lens))]

    def recur(step: FlatStep, at: slice) -> torch.Tensor:
        names = ("query", "key", "value", "decay", "strength")
        parts = [given[name][at] if name in given else None for name in names]
        epsilon = 1e-6 if is_delta else -1.0
        rule = 0, 0.5, epsilon, is_delta, rates, least, most
        return step.recur(*parts, skip, *rule)  # type: ignore[arg-type]

    output = recur(rows.step(pool), slice(None))
    first = 0
    for row, length in enumerate(lens):
        state = before[row].double()
        marks = {done: NUM_SLOTS + snapshot for done, snapshot in rows.saves.get(row, ())}
        for at in range(first, first + length):
            token = {name: each[at] for name, each in given.items()}
            if form == "by rates":
                token["decay"] = rates * token["strength"][:, None]
            elif rates is not None and rows.starts[row] + at - first < rows.prompt_lens[row]:
                token["strength"] = token["strength"].clamp(least, most)
                token["decay"] = rates * token["strength"]
            expected = rule(state, token, is_delta=is_delta, normed=is_delta)
            if skip is not None:
                expected += skip[:, None] * token["value"]
            torch.testing.assert_close(output[at], expected.float(), atol=1e-4, rtol=1e-4)
            if at + 1 - first in marks:
                saved = pool.states[0][marks[at + 1 - first]].view_as(state)
                torch.testing.assert_close(saved, state.float(), atol=1e-4, rtol=1e-4)
        kept = pool.states[0][rows.slots[row]].view_as(state)
        torch.testing.assert_close(kept, state.float(), atol=1e-4, rtol=1e-4)
        first += length
    assert torch.equal(singly(rows, copy, recur), output)
    for slot in rows.slots:
        assert torch.equal(copy.states[0][slot], pool.states[0][slot])
