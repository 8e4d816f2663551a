#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     a row of Llama 4 that is padded on the left has the logits of the row alone, but for roundings, where
#            positions are given that count from its first token: they say where each token is, to all that asks.
# Behaviour: rotary embeddings and the chunks of its mask go by the row. Its layers without rotary embeddings scale
#            queries by position, and count that from the first token of the forward, padding included: from
#            `floor_scale` tokens on (8,192 by default) logits are off, here by 4 tenths of the largest, and another
#            token may be the best one. Without `attn_temperature_tuning`, or in front of `floor_scale`, nothing is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/padded.py" <<'PROGRAM'
import sys

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 128, "intermediate_size_mlp": 128}
SMALL |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"num_local_experts": 4, "initializer_range": 0.15, "no_rope_layers": [0, 1, 0, 1], "pad_token_id": 0}
OPTIONS = {
    "as by default": {},
    "chunks of 6": {"attention_chunk_size": 6},
    "floor_scale 6": {"floor_scale": 6},
    "floor_scale 6, no tuning": {"floor_scale": 6, "attn_temperature_tuning": False},
}
LENGTH, PADDING = 12, 5

seen = {}
for name, options in OPTIONS.items():
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**SMALL | options)).eval()
    row = torch.tensor([[5, 9, 17, 33, 80, 7, 91, 44, 12, 60, 3, 150]])
    padded = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), row], 1)
    mask = (padded > 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(row).logits[0]
        beside = model(padded, attention_mask=mask, position_ids=positions).logits[0, PADDING:]
    seen[name] = float((beside - alone).abs().max() / alone.abs().max())
    same = int((beside.argmax(-1) == alone.argmax(-1)).sum())
    print(f"{name:26} off by {seen[name]:.0e} of the largest logit, best tokens equal: {same} of {LENGTH}")
is_so = all((share > 0.01) == (name == "floor_scale 6") for name, share in seen.items())
sys.exit(0 if is_so and max(seen.values()) < 10 else "padding is counted otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/padded.py"
