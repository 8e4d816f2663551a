"""Products with coded matrices: to the bit those of the dequantised matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.coded import FORMATS, matrix_of, padded_inputs, random_codes, random_matrix

from slipstream_core.kernels.codes import formats
from slipstream_core.kernels.codes.formats import Format
from slipstream_core.kernels.cpu.coded_panels import panel_format
from slipstream_core.kernels.cpu.kernels import Kernels, kernels

KERNELS = kernels()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there is no C compiler")
_FORMAT = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 64, 97)


def _kernels() -> Kernels:
    assert KERNELS is not None
    return KERNELS


def _compare(
    form: Format, num_outputs: int, num_inputs: int, rows: list[int], seed: int = 0
) -> None:
    """Compare products of so many rows, with and without a bias, and rows of the matrix."""
    matrix = random_matrix(form, num_outputs, num_inputs, seed)
    packed = _kernels().pack_codes(matrix)
    assert packed is not None
    panels, number = packed
    whole = matrix.dequantised()
    dense = _kernels().pack(whole)
    generator = torch.Generator().manual_seed(seed)
    for count in rows:
        x = torch.randn(1, count, num_inputs, generator=generator)
        bias = torch.randn(num_outputs, generator=generator) if count % 2 else None
        given_y = _kernels().product(x, panels, bias, num_outputs, number)
        expected = _kernels().product(x, dense, bias, num_outputs)
        assert torch.equal(given_y.view(torch.int32), expected.view(torch.int32)), count
    ids = torch.randint(num_outputs, (2, 3), generator=generator)
    given_rows = _kernels().coded_rows(panels, number, num_inputs, ids)
    assert torch.equal(given_rows, whole[ids])  # a zero may have another sign


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 512), (83, 1280), (7, 96)])
def test_products_are_those_of_the_dequantised_matrix(
    name: str, num_outputs: int, num_inputs: int
) -> None:
    form = FORMATS[name]
    _compare(form, num_outputs, padded_inputs(form, num_inputs), list(ROWS))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_step_may_have_no_rows(name: str) -> None:
    """Of a long prompt's first chunk no logits are asked."""
    _compare(FORMATS[name], 83, padded_inputs(FORMATS[name], 96), [0])


@given(_FORMAT, st.integers(1, 150), st.integers(1, 600), st.integers(1, 200), st.integers(0, 99))
@example(FORMATS["fp8_blocks"], 17, 129, 5, 0)
@example(FORMATS["int8_per_channel"], 33, 257, 1, 0)
@example(FORMATS["bfloat16"], 1, 1, 4, 0)
@settings(max_examples=60)
def test_any_shape(form: Format, num_outputs: int, num_inputs: int, rows: int, seed: int) -> None:
    _compare(form, num_outputs, padded_inputs(form, num_inputs), [rows], seed)


@given(_FORMAT, st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 9))
@settings(max_examples=30)
def test_a_joined_matrix_is_packed_as_one(form: Format, sizes: list[int], rows: int) -> None:
    num_inputs = padded_inputs(form, 64)
    parts = [random_matrix(form, size, num_inputs, seed) for seed, size in enumerate(sizes)]
    packed = _kernels().pack_codes(parts[0].joined(parts[1:]))
    assert packed is not None
    x = torch.randn(1, rows, num_inputs)
    whole = _kernels().product(x, packed[0], None, sum(sizes), packed[1])
    for part, given_y in zip(parts, whole.split(sizes, dim=-1), strict=True):
        alone = _kernels().pack_codes(part)
        assert alone is not None
        assert torch.equal(
            _kernels().product(x, alone[0], None, part.num_outputs, alone[1]), given_y
        )


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_panel_takes_no_more_than_the_file(name: str) -> None:
    form = FORMATS[name]
    matrix = random_matrix(form, 64, 2304)
    packed = _kernels().pack_codes(matrix)
    assert packed is not None
    assert packed[0].nbytes <= 1.04 * matrix.nbytes


@pytest.mark.parametrize(
    "form",
    [
        Format("float32 with zeros", 4, group=32, scale="float32", has_zeros=True),
        Format("float32 with a zero of 3", 5, group=32, scale="float32", zero=3),
        Format("groups of 24", 4, group=24, scale="float16"),
        Format("two types", 4, group=32, scale="float16", offset="bfloat16"),
        Format("supergroups of 128", 4, group=32, scale="float16", supergroup=128),
    ],
    ids=lambda form: form.name,
)
def test_formats_without_a_panel(form: Format) -> None:
    assert panel_format(form) is None
    matrix = random_matrix(form, 16, 384)
    assert _kernels().pack_codes(matrix) is None
    assert torch.isfinite(matrix.dequantised()).all()


@pytest.mark.parametrize(("form", "group"), [(48, 16), (96, 32), (512, 256), (0, 256)])
def test_groups_are_cut_to_what_a_block_holds(form: int, group: int) -> None:
    some = Format("some", 4, group=form, scale="float16", zero=8)
    number = panel_format(some)
    assert number is not None
    assert number >> 36 == group
    _compare(some, 20, 1536, [1, 3, 9])


def test_scales_that_are_not_finite_are_refused() -> None:
    part = random_codes(formats.Q8_0, 4, 64)
    assert part.scales is not None
    part.scales[3, 1] = float("nan")

    with pytest.raises(ValueError, match="q8_0: a scale is not a finite number"):
        _kernels().pack_codes(matrix_of(formats.Q8_0, part))
