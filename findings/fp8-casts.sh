#!/usr/bin/env bash
# Versions:  torch 2.13.0 on a CPU, ml_dtypes 0.6.0 (Python 3.11 to 3.13).
# Guess:     a cast to an FP8 type rounds to the nearest value, and what is too large is lost as in any cast of torch:
#            e4m3fn, which has no infinity, makes it NaN. So an activation or a key beyond 448 that nobody clamped shows
#            itself, and the libraries agree on the bytes.
# Behaviour: torch's cast to e4m3fn saturates: 480, 1e9 and infinity itself become 448, so an overflow in the layer
#            before is a usual number from here on. Its three siblings do not: e5m2 makes infinity of what is too large,
#            e4m3fnuz and e5m2fnuz NaN. In ml_dtypes, which JAX and numpy use, e4m3fn makes NaN from 464.1 on, the
#            halfway to a 480 that is not there. And torch drops the sign on the way to e8m0fnu, the type of
#            MX formats' scales: -3 becomes 4, NaN in ml_dtypes. All other roundings are the same bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 ml_dtypes==0.6.0 numpy
cat >"$folder/casts.py" <<'PROGRAM'
import math
import sys

import ml_dtypes
import numpy as np
import torch

GIVEN = [448.0, 464.0, 465.0, 480.0, 1e9, math.inf, -1e9, -3.0]
NAMES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
torch.manual_seed(0)
usual = torch.cat([torch.randn(100_000) * scale for scale in (1e-3, 1.0, 50.0)])
seen, same = {}, {}
for name in NAMES:
    kind, other = getattr(torch, name), getattr(ml_dtypes, name)
    given = torch.tensor(GIVEN)
    seen[name] = [float(each) for each in given.to(kind).float()]
    others = [float(each) for each in given.numpy().astype(other)]
    seen[name, "ml"] = others
    print(f"{name:16}", *(f"{each:9g}" for each in GIVEN))
    print("           torch", *(f"{each:9g}" for each in seen[name]))
    print("       ml_dtypes", *(f"{each:9g}" for each in others))
    numbers = usual.abs() if name == "float8_e8m0fnu" else usual
    numbers = numbers[numbers.abs() < 224]
    codes = numbers.to(kind).view(torch.uint8).numpy()
    same[name] = bool((codes == numbers.numpy().astype(other).view(np.uint8)).all())
print("usual numbers are the same bytes in both:", same)


def is_(values, pattern):
    """Compare with numbers, "nan" for any NaN."""
    return all(math.isnan(each) if want == "nan" else each == want for each, want in zip(values, pattern, strict=True))


is_so = all(same.values())
is_so &= is_(seen["float8_e4m3fn"], [448, 448, 448, 448, 448, 448, -448, -3])
is_so &= is_(seen["float8_e4m3fn", "ml"], [448, 448, "nan", "nan", "nan", "nan", "nan", -3])
is_so &= is_(seen["float8_e5m2"], [448, 448, 448, 512, math.inf, math.inf, -math.inf, -3])
is_so &= is_(seen["float8_e4m3fnuz"][4:], ["nan", "nan", "nan", -3])
is_so &= is_(seen["float8_e5m2fnuz"][4:], ["nan", "nan", "nan", -3])
is_so &= seen["float8_e8m0fnu"][-1] == 4 and math.isnan(seen["float8_e8m0fnu", "ml"][-1])
sys.exit(0 if is_so else "FP8 casts treat large numbers otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/casts.py"
