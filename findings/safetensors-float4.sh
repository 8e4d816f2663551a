#!/usr/bin/env bash
# Versions:  safetensors 0.8.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     a tensor of torch.float4_e2m1fn_x2, two codes to an element, has the shape in a safetensors file that it
#            has in torch, and `get_slice` reads a part of it as of any other, which is how a rank loads its rows.
# Behaviour: the header counts codes, so the last size is twice torch's. `get_tensor` gives back the tensor as it was,
#            but `get_slice` says the header's shape and raises for every slice, of rows, too. The same bytes as uint8
#            can be sliced: save codes as uint8, as compressed-tensors and gpt-oss do, or read the header and the bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy
cat >"$folder/slices.py" <<'PROGRAM'
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

codes = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
save_file({"float4": codes.clone().view(torch.float4_e2m1fn_x2), "uint8": codes}, sys.argv[1])
seen = {}
with safe_open(sys.argv[1], "pt") as file:
    for name in ("float4", "uint8"):
        whole, part = file.get_tensor(name), file.get_slice(name)
        is_whole = whole.shape == codes.shape and torch.equal(whole.view(torch.uint8), codes)
        print(f"{name}: get_tensor {tuple(whole.shape)}, as saved: {is_whole}; get_slice says {part.get_shape()}")
        said = []
        for rows, columns in ((slice(0, 2), slice(None)), (slice(None), slice(0, 4)), (slice(None), slice(None))):
            try:
                got = part[rows, columns].view(torch.uint8)
                said.append("right" if torch.equal(got, codes[rows, columns]) else "other")
            except RuntimeError as error:
                said.append("raises")
                print("  ", error)
        print("   slices:", *said)
        seen[name] = (is_whole, part.get_shape(), said)
is_so = seen == {"float4": (True, [4, 16], ["raises"] * 3), "uint8": (True, [4, 8], ["right"] * 3)}
sys.exit(0 if is_so else "slices of float4 are read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/slices.py" "$folder/codes.safetensors"
