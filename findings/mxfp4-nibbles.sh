#!/usr/bin/env bash
# Versions:  gguf 0.19.0, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     MXFP4 is a standard: 32 codes of 4 bits share one byte of exponent. So the 16 bytes of codes of a block are
#            the same in a GGUF file as in gpt-oss' safetensors, and a converter only moves the exponents.
# Behaviour: the codes and the exponents mean the same, and in both the lower half of a byte comes first, but first of
#            what differs: in safetensors a byte holds weights 2i and 2i + 1, in GGUF weights i and i + 16. Read the
#            other way, a block has the right values in other places: sizes, sums and histograms agree, products do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy
cat >"$folder/nibbles.py" <<'PROGRAM'
import sys

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, GROUPS = 4, 3
weights = np.random.default_rng(0).normal(size=(ROWS, GROUPS * 32)).astype(np.float32)
packed = quants.quantize(weights, GGMLQuantizationType.MXFP4)
meant = quants.dequantize(packed, GGMLQuantizationType.MXFP4)
blocks = packed.reshape(ROWS, GROUPS, 17)
exponents, codes = torch.tensor(blocks[..., 0]), torch.tensor(blocks[..., 1:])


def read(codes):
    """Weights as transformers reads them, [rows, columns]."""
    got = convert_moe_packed_tensors(codes[None], exponents[None], dtype=torch.float32)[0]
    return got.numpy().reshape(GROUPS * 32, ROWS).T  # it gives them transposed


def paired(codes):
    """GGUF's bytes in the order of safetensors."""
    each = torch.cat([codes & 15, codes >> 4], -1)
    return each[..., 0::2] | each[..., 1::2] << 4


copied, turned = read(codes), read(paired(codes))
same = float((copied == meant).mean())
same_values = np.array_equal(*(np.sort(each.reshape(-1, 32)) for each in (copied, meant)))
print(f"bytes copied: {same:.0%} of the weights equal; the same values in each block: {same_values}")
print("bytes paired anew: all equal:", np.array_equal(turned, meant))
is_so = same < 0.5 and same_values and np.array_equal(turned, meant)
sys.exit(0 if is_so else "MXFP4's codes lie otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/nibbles.py"
