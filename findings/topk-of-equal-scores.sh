#!/usr/bin/env bash
# Versions:  torch 2.13.0 on a CPU (Python 3.11).
# Guess:     among equal scores torch.topk takes the one with the lowest index, as torch.argmax does: a router of
#            experts, or a sampler, that is written again and takes the first of equals chooses what transformers does.
# Behaviour: it takes others. Of six zeros the best three are 3, 5, 4; of 24 none of the first eight is among the best
#            eight. Of two equal best scores among 24 the later one comes first in about half of all rows. torch.sort
#            with stable=True keeps the order. So experts of a token whose router gives equal logits (rows of zeros,
#            bfloat16) are no basis of comparison between two implementations: use a stable sort, or scores that differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy
cat >"$folder/topk.py" <<'PROGRAM'
import sys

import torch

first = {}
for size, num in ((6, 3), (24, 8)):
    zeros = torch.zeros(size)
    first[size] = zeros.topk(num)[1].tolist()
    stable = zeros.sort(descending=True, stable=True)[1][:num].tolist()
    print(f"{size} zeros: topk {first[size]}, stable sort {stable}, argmax {int(zeros.argmax())}")
    assert stable == list(range(num))
    assert int(zeros.argmax()) == 0
torch.manual_seed(0)
later = 0
for _ in range(2000):
    row = torch.randn(24)
    low, high = sorted(torch.randperm(24)[:2].tolist())
    row[low] = row[high] = 5.0
    found = row.topk(8)[1].tolist()
    later += found.index(low) > found.index(high)
print(f"two equal best of 24: the later one first in {later} of 2000 rows")
is_seen = first[6] != [0, 1, 2] and not set(first[24]) & set(range(8)) and 600 < later < 1400
sys.exit(0 if is_seen else "the lowest index comes first now")
PROGRAM
"$folder/venv/bin/python" "$folder/topk.py"
