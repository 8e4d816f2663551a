"""Products with coded matrices under AddressSanitizer and UndefinedBehaviorSanitizer."""

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
SCRIPT = """
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


@pytest.mark.long
@pytest.mark.skipif(GCC is None, reason="there is no gcc")
def test_memory_of_panels_is_read_and_written_within_its_bounds(tmp_path: Path) -> None:
    assert GCC is not None
    runtime = [
        subprocess.run(
            [GCC, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    if not all(map(os.path.isabs, runtime)):
        pytest.skip("gcc has no sanitizers")
    made = str(tmp_path / "kernels.so")
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g")
    plain = ("-O1", "-march=native", "-shared", "-fPIC", *c_library._FLAGS)
    files = map(str, c_library._SOURCES)
    subprocess.run([GCC, *plain, *checks, "-o", made, *files, "-lm"], check=True)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, made],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert len(ended.stdout.split()) > 20, ended.stdout
