#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     a row of a batch has the logits that it has alone, but for roundings; what is masked, and the other rows,
#            do not matter. So a batch is a fair reference for an engine, whatever the rope type.
# Behaviour: with "dynamic" and "longrope" (Phi-3's and Phi-4-mini's) the frequencies of the whole batch come from the
#            largest position of any row of it. Beside a row that is longer than the trained length a short one is
#            read with the stretched frequencies, and its logits are off by about a tenth of the largest. "yarn",
#            "linear" and "llama3" have one set of frequencies, and rows that do not depend on each other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/neighbours.py" <<'PROGRAM'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
TRAINED, LONG, SHORT = 16, 30, 10
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
ORIGINAL = {"original_max_position_embeddings": TRAINED}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "longrope": ("phi3", ORIGINAL, FACTORS | ORIGINAL),
    "dynamic": ("llama", {"max_position_embeddings": TRAINED}, {"factor": 4.0}),
    "yarn": ("llama", {}, {"factor": 4.0} | ORIGINAL),
    "linear": ("llama", {}, {"factor": 4.0}),
    "llama3": ("llama", {}, {"factor": 4.0} | LLAMA3 | ORIGINAL),
}


def rows():
    """A row longer than the trained length, and a shorter one, padded on the right."""
    drawn = torch.randint(1, 64, (2, LONG), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(drawn)
    mask[1, SHORT:] = 0
    return drawn * mask, mask


seen = {}
for rope_type, (kind, options, rope) in ROPES.items():
    torch.manual_seed(0)
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | rope
    config = AutoConfig.for_model(kind, **SMALL | options, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    ids, mask = rows()
    with torch.no_grad():
        beside = model(ids, attention_mask=mask).logits[1, :SHORT]
        alone = model(ids[1:, :SHORT]).logits[0]
    seen[rope_type] = float((beside - alone).abs().max() / alone.abs().max())
    print(f"{rope_type:8} a short row beside a long one: off by {seen[rope_type]:.0e} of the largest logit")
is_so = all((share > 0.01) == (kind in ("longrope", "dynamic")) for kind, share in seen.items())
sys.exit(0 if is_so else "rows depend on each other otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/neighbours.py"
