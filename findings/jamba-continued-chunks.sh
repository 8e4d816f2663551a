#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     a prompt may be given to a model of transformers in pieces, with `past_key_values` between them: each
#            piece goes on where the one before ended, whatever its length, as for attention.
# Behaviour: Jamba's Mamba layers begin a piece of more than one token from a state of zeros, without a word;
#            pieces of one token go on. So chunked prefill changes the logits by as much as they are large, while
#            prefill at once and decoding, which is what `generate` does, agree. Bamba's Mamba-2 layers, given the
#            same pieces, go on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/pieces.py" <<'PROGRAM'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}
    | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
    | {"mamba_d_state": 8},
}


def difference(model, pieces):
    """The largest difference of the last logits, whole and in pieces, as a share of the largest logit."""
    ids = torch.arange(5, 5 + sum(pieces))[None]
    with torch.no_grad():
        whole = model(ids).logits[0, -1]
        past, at = None, 0
        for length in pieces:
            given = {"position_ids": torch.arange(at, at + length)[None], "past_key_values": past}
            out = model(ids[:, at : at + length], use_cache=True, **given)
            past, at = out.past_key_values, at + length
    return float((out.logits[0, -1] - whole).abs().max() / whole.abs().max())


seen = {}
for kind, options in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **options)).eval()
    for parameter in model.parameters():  # as initialised the layers say next to nothing
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    for pieces in ((12, 1, 1), (7, 7), (7, 4, 3)):
        seen[kind, pieces] = difference(model, pieces)
        print(f"{kind:6} {'+'.join(map(str, pieces)):8} {seen[kind, pieces]:.1e}")
goes_on = all(share < 1e-3 for (kind, pieces), share in seen.items() if kind == "bamba" or pieces[1] == 1)
forgets = all(share > 1e-2 for (kind, pieces), share in seen.items() if kind == "jamba" and pieces[1] > 1)
sys.exit(0 if goes_on and forgets else "pieces are treated otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/pieces.py"
