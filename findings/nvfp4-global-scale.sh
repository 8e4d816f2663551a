#!/usr/bin/env bash
# Versions:  compressed-tensors 0.20.0, torchao 0.18.0, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to
#            3.13).
# Guess:     NVFP4 has two scales, one of FP8 to 16 weights and one of float32 to a tensor, and a weight is its code
#            times both; so who reads one tool's checkpoints reads another's by renaming tensors.
# Behaviour: codes and FP8 scales of the two tools are the same bytes, but the third number is the reciprocal:
#            torchao's `per_tensor_scale` (largest / 2688) multiplies, compressed-tensors' `weight_global_scale`
#            (2688 / largest) divides. Taken for each other the weights are wrong by its square, more than 400,000 times
#            for a tensor whose largest weight is 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
  compressed-tensors==0.20.0 torchao==0.18.0 numpy
cat >"$folder/scales.py" <<'PROGRAM'
import sys
import warnings

warnings.simplefilter("ignore")

import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils.helpers import generate_gparam
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = torch.cat([VALUES, -VALUES])
weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
largest = weight.abs().max()

theirs = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(largest))
factor = theirs.per_tensor_scale
scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
divisor = generate_gparam(weight.min(), weight.max())
groups = (weight.reshape(8, 4, 16).abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
given = {"weight": weight, "weight_scale": groups.float(), "weight_global_scale": divisor}
packed = NVFP4PackedCompressor.compress(given, scheme)

same_codes = torch.equal(packed["weight_packed"], theirs.qdata.view(torch.uint8))
same_scales = torch.equal(packed["weight_scale"].view(torch.uint8), theirs.scale.view(torch.uint8))
print(f"codes equal: {same_codes}, scales of groups equal: {same_scales}")
product = float(factor * divisor)
print(f"per tensor: torchao {float(factor):.6f}, compressed-tensors {float(divisor):.3f}, product {product:.4f}")

codes = torch.stack([packed["weight_packed"] & 15, packed["weight_packed"] >> 4], -1).reshape(8, 4, 16)
scaled = VALUES[codes.long()] * packed["weight_scale"].float()[..., None]


def off(values, reference):
    """The largest difference as a share of the largest weight."""
    return float((values.reshape(8, 64).float() - reference.float()).abs().max() / reference.float().abs().max())


ours = NVFP4PackedCompressor.decompress(dict(packed), scheme)["weight"]
seen = {
    "torchao's, multiplied": off(scaled * factor, theirs.dequantize(torch.float32)),
    "compressed-tensors', divided": off(scaled / divisor, ours),
    "compressed-tensors', multiplied": off(scaled * divisor, ours),
}
for how, share in seen.items():
    print(f"{how}: off by {share:.1e} of the largest weight")
multiplied, divided, wrong = seen.values()
is_so = same_codes and same_scales and multiplied < 1e-5 and divided < 0.01 and wrong > 1e4
sys.exit(0 if is_so else "scales of NVFP4 mean something else now")
PROGRAM
"$folder/venv/bin/python" "$folder/scales.py"
