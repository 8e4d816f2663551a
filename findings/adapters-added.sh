#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     `add_weighted_adapter(..., combination_type="linear")` makes an adapter whose update is the weighted sum
#            of the updates, as an engine would compute that adds several adapters' outputs to a row.
# Behaviour: it sums the factors, each times the root of its weight, and so multiplies the sums: of two adapters the
#            update also has the first's B with the second's A, and the reverse. It is off by as much as one of the
#            updates. The sum is what "cat" makes, but for roundings, at the price of a rank that is the sum of theirs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check peft==0.21.2 torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/added.py" <<'PROGRAM'
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
warnings.simplefilter("ignore")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
WEIGHTS = [0.7, 0.4]
torch.manual_seed(0)
options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), options, "first")
model.add_adapter("second", options)
for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, std=0.2) if "lora_" in name else None
layer = model.base_model.model.model.layers[0].self_attn.q_proj
first, second = layer.get_delta_weight("first"), layer.get_delta_weight("second")
right = WEIGHTS[0] * first + WEIGHTS[1] * second
A = {name: layer.lora_A[name].weight for name in ("first", "second")}
B = {name: layer.lora_B[name].weight for name in ("first", "second")}
scale, roots = layer.scaling["first"], [weight**0.5 for weight in WEIGHTS]
crossed = scale * roots[0] * roots[1] * (B["first"] @ A["second"] + B["second"] @ A["first"])
seen = {}
for kind in ("linear", "cat"):
    model.add_weighted_adapter(["first", "second"], WEIGHTS, kind, combination_type=kind)
    made = layer.get_delta_weight(kind)
    off, without = (float((made - each).abs().max() / first.abs().max()) for each in (right, right + crossed))
    seen[kind] = (off, without)
    rank = layer.lora_A[kind].weight.shape[0]
    print(f"{kind:6} rank {rank}: off by {off:.1e} of an update, but for the cross terms by {without:.1e}")
is_so = seen["linear"][0] > 0.1 and seen["linear"][1] < 1e-5 and seen["cat"][0] < 1e-5
sys.exit(0 if is_so else "adapters are combined otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/added.py"
