"""Matrices that are quantised: by the rules of ggml's reference, weight by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.kernels.codes.formats import (
    FP8_PER_BLOCK,
    FP8_PER_CHANNEL,
    INT8_PER_CHANNEL,
    Q4_0,
    Q8_0,
    Format,
)
from slipstream_core.kernels.codes.online import ONLINE, quantised

F = np.float32


def _half(x: np.float32) -> np.float32:
    return F(np.float16(x))


def _q8_0(group: Sequence[np.float32]) -> list[float]:
    """quantize_row_q8_0_ref and dequantize_row_q8_0 of ggml-quants.c."""
    d = F(max(abs(x) for x in group) / F(127))
    inverse = F(1) / d if d else F(0)
    codes = [int(math.copysign(math.floor(abs(F(x * inverse)) + 0.5), x)) for x in group]
    return [float(F(code) * _half(d)) for code in codes]


def _q4_0(group: Sequence[np.float32]) -> list[float]:
    """quantize_row_q4_0_ref and dequantize_row_q4_0."""
    d = F(max(group, key=abs) / F(-8))
    inverse = F(1) / d if d else F(0)
    codes = [min(15, int(F(F(x * inverse) + F(8.5)))) for x in group]
    return [float(F(code - 8) * _half(d)) for code in codes]


def _int8(row: Sequence[np.float32]) -> list[float]:
    d = F(max(abs(x) for x in row) / F(127))
    return [float(F(round(float(F(x / d)))) * d) if d else 0.0 for x in row]


_WEIGHTS = st.floats(-100, 100, width=32).map(F)


@pytest.mark.parametrize(
    ("form", "oracle"), [(Q8_0, _q8_0), (Q4_0, _q4_0), (INT8_PER_CHANNEL, _int8)]
)
@settings(max_examples=60)
@given(data=st.data())
def test_weights_are_those_of_the_reference(
    form: Format, oracle: object, data: st.DataObject
) -> None:
    num_groups = data.draw(st.integers(1, 3))
    groups = data.draw(
        st.lists(st.lists(_WEIGHTS, min_size=32, max_size=32), min_size=num_groups, max_size=4)
    )
    assert callable(oracle)
    weight = torch.from_numpy(np.array(groups, np.float32))
    expected = torch.tensor([oracle(group) for group in groups])
    assert torch.equal(quantised(weight, form).dequantised(), expected)


_E4M3 = sorted(
    {
        (-1) ** sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa / 512)
        for sign in (0, 1)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def _nearest_e4m3(x: float) -> float:
    """Of the numbers of 8 bits the nearest, of two the one whose mantissa is even."""
    steps = {each: place for place, each in enumerate(e for e in _E4M3 if e >= 0)}
    return min(_E4M3, key=lambda each: (abs(each - x), steps[abs(each)] % 2))


@given(st.integers(1, 140), st.integers(1, 140), st.integers(0, 1000), st.data())
@settings(max_examples=40)
def test_numbers_of_8_bits_are_the_nearest(
    num_outputs: int, num_inputs: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    row = data.draw(st.integers(0, num_outputs - 1))
    column = data.draw(st.integers(0, num_inputs - 1))
    for form, height, width in ((FP8_PER_CHANNEL, 1, num_inputs), (FP8_PER_BLOCK, 128, 128)):
        first, start = row // height * height, column // width * width
        block = weight[first : first + height, start : start + width]
        scale = F(block.abs().max().item()) / F(448)
        expected = F(_nearest_e4m3(float(F(weight[row, column].item()) / scale))) * scale
        found = quantised(weight, form).dequantised()
        assert found[row, column].item() == float(expected)


@pytest.mark.parametrize("name", ONLINE)
def test_quantising_again_changes_nothing(name: str) -> None:
    form = ONLINE[name]
    once = quantised(torch.randn(40, 96), form).dequantised()
    again = quantised(once, form).dequantised()
    torch.testing.assert_close(again, once, rtol=1e-3, atol=0)
    if form.group == 32:
        assert torch.equal(again, once)


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_read_as_the_whole_is(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(50, 1 << 16).to(dtype)  # in several parts
    matrix = quantised(weight, ONLINE[name])
    ids = torch.tensor([49, 0, 17, 17])
    assert torch.equal(matrix.rows(ids), matrix.dequantised()[ids])
    assert (matrix.dequantised() - weight.float()).abs().max() < 0.5


def test_what_does_not_fit_is_refused() -> None:
    for number in (float("nan"), float("inf")):
        weight = torch.ones(2, 32)
        weight[1, 3] = number
        for form in ONLINE.values():
            with pytest.raises(ValueError, match="a weight is not a finite number"):
                quantised(weight, form)
    with pytest.raises(ValueError, match="q8_0: a weight is too large"):
        quantised(torch.full((1, 32), 1e9), Q8_0)
    with pytest.raises(ValueError, match="40 inputs are no whole groups of 32"):
        quantised(torch.ones(1, 40), Q4_0)
    for form in ONLINE.values():
        assert not quantised(torch.zeros(3, 32), form).dequantised().any()
