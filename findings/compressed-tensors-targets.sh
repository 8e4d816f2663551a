#!/usr/bin/env bash
# Versions:  compressed-tensors 0.20.0, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     where patterns of two config_groups match a layer, the group that stands first in the configuration gives
#            its bits; a target that stands in two groups belongs to the first of them.
# Behaviour: apply_quantization_config sorts targets by the alphabet: the pattern whose text is the smaller wins wherever
#            it stands, also where it is the wider one (`re:.*_proj` before `re:.*down.*`). A name wins over patterns and
#            these over classes. Of a target that stands in two groups the last group counts. A reader that goes by the
#            configuration's order unpacks such a checkpoint's layers with another group's bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
    compressed-tensors==0.20.0 numpy
cat >"$folder/targets.py" <<'PROGRAM'
import sys

import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(8, 8), "down_proj": torch.nn.Linear(8, 8)})
        self.lm_head = torch.nn.Linear(8, 8)


def bits_of(*groups):
    config = {
        f"group_{index}": {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}
        for index, (bits, *targets) in enumerate(groups)
    }
    model = Model()
    apply_quantization_config(model, QuantizationConfig(config_groups=config))
    named = (("up", model.mlp["up_proj"]), ("down", model.mlp["down_proj"]), ("head", model.lm_head))
    return {name: layer.quantization_scheme.weights.num_bits for name, layer in named}


is_so = True
for groups, expected in (
    (((4, "re:mlp.*", "Linear"), (8, "re:.*down_proj")), {"up": 4, "down": 8, "head": 4}),
    (((8, "re:.*down_proj"), (4, "re:mlp.*", "Linear")), {"up": 4, "down": 8, "head": 4}),
    (((8, "re:.*down.*"), (4, "re:.*_proj", "Linear")), {"up": 4, "down": 4, "head": 4}),
    (((4, "Linear"), (8, "lm_head")), {"up": 4, "down": 4, "head": 8}),
    (((4, "re:mlp.*", "Linear"), (8, "re:mlp.*")), {"up": 8, "down": 8, "head": 4}),
):
    found = bits_of(*groups)
    print(" then ".join(f"{bits} bits for {', '.join(targets)}" for bits, *targets in groups), "->", found)
    is_so &= found == expected
sys.exit(0 if is_so else "targets count in another order now")
PROGRAM
"$folder/venv/bin/python" "$folder/targets.py" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
