#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     where a call has `past_key_values` and no `position_ids`, a model of transformers counts positions from
#            the length of the past, as Llama does; so a loop of one's own may leave them out.
# Behaviour: Bamba counts each call from zero, without a word, and rotates its queries and keys by that; Falcon-H1,
#            another hybrid with rotary positions, counts from the past. `generate` gives positions, so its
#            tokens are right; logits of a loop without them are not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/positions.py" <<'PROGRAM'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8}
SMALL |= {"mamba_n_groups": 1, "mamba_d_state": 8}
MODELS = {"bamba": {"attn_layer_indices": [1]}, "falcon_h1": {"mamba_d_ssm": 64, "head_dim": 8}}


def difference(model, with_positions):
    """The largest difference of the last logits, whole and token by token, as a share of the largest."""
    ids = torch.arange(5, 19)[None]
    with torch.no_grad():
        whole = model(ids).logits[0, -1]
        past = None
        for at in range(ids.shape[1]):
            given = {"position_ids": torch.tensor([[at]])} if with_positions else {}
            out = model(ids[:, at : at + 1], past_key_values=past, use_cache=True, **given)
            past = out.past_key_values
    return float((out.logits[0, -1] - whole).abs().max() / whole.abs().max())


seen = {}
for kind, options in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **options)).eval()
    for parameter in model.parameters():  # as initialised the layers say next to nothing
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    for with_positions in (True, False):
        seen[kind, with_positions] = difference(model, with_positions)
        print(f"{kind:9} {'with' if with_positions else 'without':7} position_ids: {seen[kind, with_positions]:.1e}")
wrong = {which for which, share in seen.items() if share > 1e-3}
sys.exit(0 if wrong == {("bamba", False)} else "positions are counted otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/positions.py"
