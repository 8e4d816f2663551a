"""Products with coded matrices, experts, and attention over caches of 8 bits under
AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream_core.kernels.cpu import c_library

GCC = shutil.which("gcc")
ROOT = Path(__file__).parents[4]
PRODUCTS = """
import sys

import torch
from tests.helpers.coded import FORMATS, padded_inputs, random_matrix

from slipstream_core.kernels.cpu.kernels import Kernels

kernels = Kernels(sys.argv[1])
torch.set_num_threads(1)
for form in FORMATS.values():
    for num_outputs, least in ((1, 1), (7, 33), (83, 290)):
        num_inputs = padded_inputs(form, least)
        matrix = random_matrix(form, num_outputs, num_inputs)
        panels, number = kernels.pack_codes(matrix)
        panels = panels.clone()  # memory of exactly this size
        dense = kernels.pack(matrix.dequantised())
        for rows in (1, 2, 5, 97):
            x = torch.randn(1, rows, num_inputs)
            coded = kernels.product(x, panels, None, num_outputs, number)
            assert torch.equal(coded, kernels.product(x, dense, None, num_outputs))
        kernels.coded_rows(panels, number, num_inputs, torch.tensor([0, num_outputs - 1]))
    print(form.name)
"""
EXPERTS = """
import sys
from itertools import product

import torch
from tests.engine_core.kernels.cpu.test_experts import OF_EXPERTS, _inputs, _mixture

from slipstream_core.kernels.cpu.kernels import Kernels

kernels = Kernels(sys.argv[1])
torch.set_num_threads(1)
for (form, has_bias), (k, inner, n) in product(OF_EXPERTS, ((1, 1, 1), (7, 5, 3), (33, 17, 40))):
    for experts in (1, 3, 17):
        mixture = _mixture(form, has_bias=has_bias, experts=experts, k=k, inner=inner, n=n)
        packed = mixture.packed(kernels)
        for chosen, tokens, threads in product({1, experts}, (1, 2, 33), (1, 2)):
            kernels.set_threads(threads)
            x, ids, weights = _inputs(mixture, tokens, chosen, k)
            given = packed(x, ids, weights)
            torch.testing.assert_close(given, mixture(x, ids, weights), rtol=2e-4, atol=4e-3)
            ids[:], weights[0] = ids[0].clone(), 0  # others have no row, and a row has no weight
            given = packed(x, ids, weights)
            torch.testing.assert_close(given, mixture(x, ids, weights), rtol=2e-4, atol=4e-3)
    print(form.activation)
"""
CACHES = """
import sys

import torch
from tests.engine_core.attention.test_torch_backend import Case, make_step

from slipstream_core.kernels.cpu.kernels import Kernels

kernels = Kernels(sys.argv[1])
torch.set_num_threads(1)
numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 0, -0.0, 2e-43, -2e-43, 1e30, -3e38])
for form in ("auto", "fp8_e4m3", "int8_per_token_head"):
    for dim, rotated in ((1, None), (7, None), (33, None), (12, 4)):
        case = Case(3, 2, dim, dim + 1, 4, [5, 9, 30], [(2, 40)], 6, None, None, True, 1, rotated)
        step = make_step(case, kernels=kernels, form=form)
        output = step.context.attend(0, step.query, step.key, step.value, step.params)
        torch.testing.assert_close(output, step.expected, atol=2e-5, rtol=1e-4)
        key = numbers.repeat(step.key.numel() // 9 + 1)[: step.key.numel()].view(step.key.shape)
        step.context.attend(0, step.query, key, step.value, step.params)
    print(form)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The library with sanitizers, and the environment of a program that loads it."""
    if GCC is None:
        pytest.skip("there is no gcc")
    runtime = [
        subprocess.run(
            [GCC, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("gcc has no sanitizers")
    made = str(tmp_path_factory.mktemp("sanitized") / "kernels.so")
    undefined = "-fsanitize=address,undefined,float-cast-overflow"
    checks = (undefined, "-fno-sanitize-recover=undefined,float-cast-overflow", "-g")
    plain = ("-O1", "-march=native", "-shared", "-fPIC", *c_library._FLAGS)
    files = map(str, c_library._SOURCES)
    subprocess.run([GCC, *plain, *checks, "-o", made, *files, "-lm"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    return made, environment


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "least"),
    [
        pytest.param(PRODUCTS, 21, id="products"),
        pytest.param(EXPERTS, 5, id="experts"),
        pytest.param(CACHES, 3, id="caches"),
    ],
)
def test_memory_is_read_and_written_within_its_bounds(
    script: str, least: int, sanitized: tuple[str, dict[str, str]]
) -> None:
    made, environment = sanitized
    ended = subprocess.run(
        [sys.executable, "-c", script, made],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(ended.stdout.splitlines()) >= least, ended.stdout
