#!/usr/bin/env bash
# Versions:  bitsandbytes 0.50.2, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     quantize_4bit and dequantize_4bit take a matrix as a flat run of blocks wherever they run, so that what
#            comes back differs from what was given by at most half a step of its block, whatever the shape.
# Behaviour: quantising is flat, and dequantising on a CPU is not: its kernel begins a new block with each row. Where
#            a row is no multiple of the blocksize (96 x 96 with blocks of 64) all scales behind the first row are
#            those of other blocks, the largest error is four times as large, and nothing is said. The numbers by the
#            flat definition, codes of the table times the scale of `index // blocksize`, are right. Where rows are
#            multiples both are the same to the bit; with an odd number of columns a fallback in Python is right, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 bitsandbytes==0.50.2 numpy
cat >"$folder/rows.py" <<'PROGRAM'
import sys

import bitsandbytes.functional as F
import torch

torch.manual_seed(0)
is_so = True
for kind in ("nf4", "fp4"):
    for shape, block, differs in (
        ((64, 128), 64, False),
        ((96, 192), 64, False),
        ((96, 96), 64, True),
        ((96, 192), 128, True),
        ((50, 64), 128, True),
        ((64, 95), 64, False),
    ):
        given = torch.randn(shape) * 0.05
        packed, state = F.quantize_4bit(given, blocksize=block, quant_type=kind)
        back = F.dequantize_4bit(packed, state)
        both = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 15), -1).reshape(-1).long()
        codes = both[: given.numel()]
        flat = (state.code[codes] * state.absmax[torch.arange(codes.numel()) // block]).reshape(shape)
        errors = [float((each - given).abs().max()) for each in (back, flat)]
        print(f"{kind} {shape} in blocks of {block}: largest error {errors[0]:.3f}, by the definition {errors[1]:.3f}")
        is_so &= torch.equal(back, flat) != differs
        is_so &= not differs or errors[0] > 2 * errors[1] or kind == "fp4"
sys.exit(0 if is_so else "blocks that run over the ends of rows are dequantised otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/rows.py" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
