"""Blocks are read as codes that mean what the package `gguf` says that they mean, to the bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.helpers.gguf_models import GRIDS, K_QUANTS, TYPES

from slipstream_core.model.gguf.blocks import coded_matrix, has_finite_scales, is_coded
from slipstream_core.model.gguf.reader import Tensor, read_gguf
from slipstream_core.model.gguf.tensor_types import SERVED

ROWS, INPUTS = 70, 512
SCALES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def test_sizes_are_those_of_the_package() -> None:
    for number, kind in SERVED.items():
        qtype = gguf.GGMLQuantizationType(number)
        assert (qtype.name, gguf.GGML_QUANT_SIZES[qtype]) == (
            kind.name,
            (kind.block_len, kind.block_bytes),
        )


def random_tensor(path: Path, kind: str) -> tuple[Tensor, np.ndarray]:
    """A tensor of random bits with finite scales, and its values by the package."""
    qtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    random = np.random.default_rng(3)
    raw = random.integers(0, 256, (ROWS, INPUTS // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = random.integers(0, 250, raw.shape[:2])  # 255 is not a number
    elif block == 1:
        numbers = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
        bits = numbers.view(np.uint32) >> 16 if kind == "BF16" else numbers.astype(np.float16)
        raw = bits.astype(np.uint16 if kind == "BF16" else np.float16).view(np.uint8)
    else:
        for at in SCALES.get(kind, (0,)):
            halves = random.normal(size=raw.shape[:2]).astype(np.float16)
            raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    rows = raw.reshape(ROWS, -1)
    writer = gguf.GGUFWriter(path, "llama")
    stored = rows.view(np.float16) if kind == "F16" else rows
    writer.add_tensor("a.weight", stored, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = stored.astype(np.float32) if kind == "F16" else gguf.quants.dequantize(rows, qtype)
    return read_gguf(path).tensors["a.weight"], values


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "F32"])
def test_codes_mean_what_the_package_says(kind: str, tmp_path: Path) -> None:
    tensor, expected = random_tensor(tmp_path / "x.gguf", kind)
    assert is_coded(tensor)
    matrix = coded_matrix(tensor)
    assert matrix.shape == (ROWS, INPUTS)
    values = matrix.dequantised().numpy()
    if kind == "MXFP4":
        expected = np.where(expected, expected, values * 0)  # to the package it has no -0
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))
    ids = torch.tensor([5, 5, 0, ROWS - 1])
    assert np.array_equal(matrix.rows(ids).numpy(), expected[ids])
    if kind not in (*K_QUANTS, *GRIDS):  # whose codes or factors take more bits here
        assert matrix.nbytes == tensor.nbytes


@pytest.mark.parametrize("kind", [*SCALES, *GRIDS, "Q8_0", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_a_scale_that_is_no_number_is_seen(kind: str, tmp_path: Path) -> None:
    tensor, _ = random_tensor(tmp_path / "x.gguf", kind)
    assert has_finite_scales(tensor)
    content = bytearray(tensor.file.read_bytes())
    for at in SCALES.get(kind, (0,)):
        start = tensor.start + tensor.nbytes - tensor.type.block_bytes + at
        for bad in ("inf", "-inf", "nan"):
            wrong = bytearray(content)
            wrong[start : start + 2] = b"\xff\0" if kind == "MXFP4" else np.float16(bad).tobytes()
            tensor.file.write_bytes(wrong)
            assert not has_finite_scales(tensor)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_rows_come_in_the_order_that_is_asked_for(kind: str, tmp_path: Path) -> None:
    tensor, expected = random_tensor(tmp_path / "x.gguf", kind)
    order = np.random.default_rng(0).permutation(ROWS)
    assert np.array_equal(
        coded_matrix(tensor).reordered(order).dequantised().numpy(), expected[order]
    )
