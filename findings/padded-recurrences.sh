#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     a model of transformers that takes `attention_mask` reads a row padded on the left as it reads the row
#            alone, but for roundings, also where its layers are recurrences: the mask keeps padding out of the state.
# Behaviour: Mamba-2's (Bamba) and Qwen3-Next's layers keep it out. RecurrentGemma's recurrent layers are not given the
#            mask. Their recurrence begins anew at each position 0, and so forgets the padding where positions are given
#            that count from the first token, which `generate` does; the convolution before it reads the three
#            paddings before the row as tokens all the same, and logits are off by a tenth and more of the largest. With
#            a convolution of one token nothing is off; without positions all of it is again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/padded.py" <<'PROGRAM'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
    | {"mamba_d_state": 8},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 2}
    | {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64, "conv1d_width": 4},
    "recurrent_gemma, width 1": {"lru_width": 32, "attention_window_size": 64, "conv1d_width": 1},
}
LENGTH, PADDING = 6, 5

seen = {}
for kind, options in MODELS.items():
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.partition(",")[0], **SMALL | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    row = torch.randint(3, 64, (1, LENGTH))
    padded = torch.cat([torch.zeros(1, PADDING, dtype=torch.long), row], 1)
    mask = (padded > 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for how, given in {"with positions": {"position_ids": positions}, "without positions": {}}.items():
        with torch.no_grad():
            alone = model(row).logits[0]
            beside = model(padded, attention_mask=mask, **given).logits[0, PADDING:]
        seen[kind, how] = float((beside - alone).abs().max() / alone.abs().max())
        print(f"{kind:24} {how:17} off by {seen[kind, how]:.0e} of the largest logit")
READS_PADDING = {("recurrent_gemma", how) for how in ("with positions", "without positions")}
READS_PADDING |= {("recurrent_gemma, width 1", "without positions")}
is_so = all((share > 0.01) == (each in READS_PADDING) for each, share in seen.items())
sys.exit(0 if is_so else "padding is read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/padded.py"
