"""Coded matrices: what their codes mean, in parts and in rows, joined or not."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.coded import (
    FORMATS,
    matrix_of,
    padded_inputs,
    random_codes,
    random_matrix,
    take,
)

from slipstream_core.kernels.codes import formats
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix, of_tensor
from slipstream_core.kernels.codes.formats import Codes, Format

_FORMAT = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)


def _number(bits: Any, kind: str | None) -> Fraction:
    if kind == "bfloat16":
        return Fraction(float(np.uint32(int(bits) << 16).view(np.float32)))
    if kind == "e8m0":
        return Fraction(2) ** (int(bits) - 127)
    return Fraction(float(bits))


def _value(form: Format, code: Any) -> Fraction:
    """What a code is, by torch's own types."""
    if isinstance(form.values, tuple):
        return Fraction(float(np.float32(form.values[code])))
    if form.values in ("integer", "unsigned"):
        return Fraction(int(code))
    dtype, holder = {
        "bfloat16": (torch.bfloat16, torch.uint16),
        "float16": (torch.float16, torch.uint16),
        "float8_e4m3": (torch.float8_e4m3fn, torch.uint8),
        "float8_e5m2": (torch.float8_e5m2, torch.uint8),
    }[form.values]
    return Fraction(torch.tensor([int(code)], dtype=holder).view(dtype).float().item())


def _float32(exact: Fraction) -> Fraction:
    """The nearest float32 of a number whose float64 is exact enough not to round twice."""
    return Fraction(float(np.float32(float(exact))))


def _weight(form: Format, part: Codes, row: int, column: int) -> Fraction:
    """A weight by rational arithmetic, rounded to float32 where the format says."""
    value = _value(form, part.codes[row, column])
    if part.scales is None:
        return value
    group = column // form.group if form.group else 0
    top = column // form.supergroup if form.supergroup else group
    scale = _number(part.scales[row, top], form.scale)
    if part.scale_factors is not None:
        scale *= int(part.scale_factors[row, group])
    value -= form.zero if part.zeros is None else int(part.zeros[row, group])
    product = _float32(scale * value)
    if part.offsets is None:
        return product
    assert product == scale * value  # what Format promises
    offset = _number(part.offsets[row, top], form.offset)
    if part.offset_factors is not None:
        offset *= int(part.offset_factors[row, group])
    return _float32(product + offset)


@given(_FORMAT, st.integers(1, 40), st.integers(1, 300), st.integers(0, 1000), st.data())
def test_a_weight_is_what_its_format_says(
    form: Format, num_outputs: int, num_inputs: int, seed: int, data: st.DataObject
) -> None:
    num_inputs = padded_inputs(form, num_inputs)
    part = random_codes(form, num_outputs, num_inputs, seed)
    whole = matrix_of(form, part).dequantised()
    assert whole.dtype == torch.float32
    assert whole.shape == (num_outputs, num_inputs)
    for _ in range(5):
        row = data.draw(st.integers(0, num_outputs - 1))
        column = data.draw(st.integers(0, num_inputs - 1))
        assert Fraction(whole[row, column].item()) == _weight(form, part, row, column)


@given(_FORMAT, st.lists(st.integers(1, 20), min_size=1, max_size=4), st.data())
def test_a_joined_matrix_is_its_parts_one_below_the_other(
    form: Format, sizes: list[int], data: st.DataObject
) -> None:
    num_inputs = padded_inputs(form, 40)
    parts = [random_matrix(form, size, num_inputs, seed) for seed, size in enumerate(sizes)]
    joined = parts[0].joined(parts[1:])
    expected = torch.cat([part.dequantised() for part in parts])
    assert joined.shape == tuple(expected.shape)
    assert joined.nbytes == sum(part.nbytes for part in parts)
    assert torch.equal(joined.dequantised(), expected)
    ids = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9))
    assert torch.equal(joined.rows(torch.tensor(ids, dtype=torch.int64)), expected[ids])


@given(_FORMAT, st.integers(1, 20), st.data())
def test_a_slice_is_that_of_the_dequantised_matrix(
    form: Format, num_outputs: int, data: st.DataObject
) -> None:
    unit = form.supergroup or form.group or 1
    num_inputs = padded_inputs(form, 3 * unit if unit > 1 else 40)
    matrix = random_matrix(form, num_outputs, num_inputs)
    first = data.draw(st.integers(0, num_outputs))
    rows = slice(first, data.draw(st.integers(first, num_outputs)))
    begin = unit * data.draw(st.integers(0, num_inputs // unit))
    end = data.draw(st.sampled_from([*range(begin, num_inputs, unit), num_inputs]))
    part = matrix.sliced(rows, slice(begin, end))
    expected = matrix.dequantised()[rows, begin:end]
    assert part.shape == tuple(expected.shape)
    if end > begin:
        assert torch.equal(part.dequantised(), expected)
        ids = torch.arange(part.num_outputs).flip(0)
        assert torch.equal(part.rows(ids), expected[ids])


def test_a_slice_through_a_group_is_refused() -> None:
    matrix = random_matrix(formats.Q4_0, 4, 96)
    with pytest.raises(ValueError, match="q4_0: inputs 0 to 48 are no whole groups of 32"):
        matrix.sliced(slice(None), slice(0, 48))


@given(_FORMAT, st.integers(1, 5))
@settings(max_examples=30)
def test_a_matrix_is_read_in_parts_that_begin_where_they_are_asked_to(
    form: Format, multiple: int
) -> None:
    num_inputs = padded_inputs(form, 1 << 17)
    matrix = random_matrix(form, 23, num_inputs)
    starts = [first for first, _ in matrix.parts(multiple)]
    assert len(starts) > 1
    assert all(first % multiple == 0 for first in starts)
    assert sum(len(part.codes) for _, part in matrix.parts(multiple)) == 23


def test_rows_have_the_shape_of_their_numbers() -> None:
    matrix = random_matrix(formats.Q8_0, 7, 64)
    ids = torch.tensor([[3, 3, 0], [6, 1, 2]])
    assert torch.equal(matrix.rows(ids), matrix.dequantised()[ids])
    for wrong in (-1, 7):
        with pytest.raises(IndexError, match=f"row {wrong}"):
            matrix.rows(torch.tensor([wrong]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_read_where_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 9).to(dtype)
    form = formats.BFLOAT16 if dtype == torch.bfloat16 else formats.FLOAT16
    matrix = of_tensor(weight, form)
    assert torch.equal(matrix.dequantised(), weight.float())
    weight[2, 3] = 7.0  # no copy
    assert matrix.rows(torch.tensor([2]))[0, 3] == 7.0
    assert matrix.nbytes == weight.nbytes


def test_matrices_of_other_formats_or_inputs_do_not_join() -> None:
    one = random_matrix(formats.Q8_0, 4, 64)
    with pytest.raises(ValueError, match="q4_0 of 64 inputs does not join q8_0 of 64"):
        one.joined([random_matrix(formats.Q4_0, 4, 64)])
    with pytest.raises(ValueError, match="of 96 inputs does not join"):
        one.joined([random_matrix(formats.Q8_0, 4, 96)])


def test_a_file_s_bytes_are_those_of_its_blocks() -> None:
    """Bytes of 256 inputs, as ggml-common.h asserts the sizes of its blocks."""
    sizes = {
        "q8_0": 8 * 34, "q4_0": 8 * 18, "q4_1": 8 * 20, "q5_0": 8 * 22, "q5_1": 8 * 24,
        "q6_k": 210, "iq4_nl": 8 * 18, "mxfp4": 8 * 17,
    }  # fmt: skip
    for name, size in sizes.items():
        assert FORMATS[name].row_bytes(256) == size
    # of six bits in the file, a byte here: 1.03 and 1.02 times as much
    assert (FORMATS["q4_k"].row_bytes(256), FORMATS["q5_k"].row_bytes(256)) == (148, 180)
    assert FORMATS["iq4_xs"].row_bytes(256) == 138  # of 136
    # codes of two and three bits take four: of 84 and 110
    assert (FORMATS["q2_k"].row_bytes(256), FORMATS["q3_k"].row_bytes(256)) == (164, 146)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"bfloat16", "float16"}))
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(name: str, number: float) -> None:
    form = FORMATS[name]
    part = random_codes(form, 4, padded_inputs(form, 40))
    assert part.scales is not None
    part.scales[2, 0] = {
        "bfloat16": 0x7FC0 if np.isnan(number) else 0x7F80,
        "e8m0": 0xFF,
    }.get(str(form.scale), number)
    with pytest.raises(ValueError, match=f"{name}: a scale is not a finite number"):
        matrix_of(form, part).dequantised()
    assert torch.isfinite(matrix_of(form, part).rows(torch.tensor([0, 1, 3]))).all()


@pytest.mark.parametrize(("name", "code"), [("fp8_blocks", 0xFF), ("fp8_channel", 0x7C)])
def test_codes_that_are_no_numbers_are_refused(name: str, code: int) -> None:
    part = random_codes(FORMATS[name], 3, 40)
    part.codes[1, 7] = code
    with pytest.raises(ValueError, match=f"{name}: a code is not"):
        matrix_of(FORMATS[name], part).dequantised()


def test_every_float8_is_what_torch_makes_of_it() -> None:
    for values, dtype, finite in (
        ("float8_e4m3", torch.float8_e4m3fn, lambda code: code & 0x7F != 0x7F),
        ("float8_e5m2", torch.float8_e5m2, lambda code: code & 0x7C != 0x7C),
    ):
        form = Format("f8", 8, values, scale="float32")  # type: ignore[arg-type]
        codes = np.array([[code for code in range(256) if finite(code)]], np.uint8)
        part = Codes(codes, scales=np.ones((1, 1), np.float32))
        expected = torch.from_numpy(codes).view(dtype).float()
        assert torch.equal(matrix_of(form, part).dequantised(), expected)


def test_a_reader_that_gives_something_else_is_told() -> None:
    part = random_codes(formats.Q4_K, 4, 256)

    def read_as(**changes: Any) -> CodedMatrix:
        named = {name: getattr(part, name) for name in Codes.__slots__} | changes
        return CodedMatrix(formats.Q4_K, 4, 256, lambda rows: take(Codes(**named), rows))

    assert part.scales is not None
    for changes, said in (
        ({"codes": part.codes[:, :255]}, "codes are uint8 [4, 255], allowed: uint8 [4, 256]"),
        ({"scales": part.scales.astype(np.float32)}, "scales are float32 [4, 1]"),
        ({"offsets": None}, "none offsets, where the format says otherwise"),
        ({"zeros": part.scale_factors}, "some zeros, where"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_as(**changes).dequantised()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bits": 3, "scale": "float16"}, "codes of 3 bits"),
        ({"bits": 5, "values": formats.FP4_VALUES, "scale": "float16"}, "codes of 5 bits"),
        ({"bits": 4, "values": (1.0, 2.0), "scale": "float16"}, "a table of 2 values"),
        ({"bits": 4}, "codes of 16 bits have no scale"),
        ({"bits": 16, "values": "float16", "scale": "float16"}, "codes of 16 bits have no scale"),
        ({"bits": 4, "scale": "float32", "offset": "float32"}, "does not fit into float32"),
        ({"bits": 8, "scale": "float16", "zero": 1, "has_zeros": True}, "one of them"),
        ({"bits": 4, "scale": "float16", "group": 48, "supergroup": 256}, "groups of 48 in 256"),
        ({"bits": 8, "values": "float8_e4m3", "scale": "float32", "zero": 3}, "only integers"),
    ],
)
def test_formats_that_are_none_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Format("other", **arguments)
