#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     a weight that is far too large (a wrong scale, a broken file) shows as NaN or infinity among the logits of
#            each token behind it: whoever counts NaN there, as vLLM does with VLLM_COMPUTE_NANS_IN_LOGITS, sees it.
# Behaviour: beyond 1.8e19, the root of float32's maximum, an embedding's squares are infinite, so RMSNorm and LayerNorm
#            multiply by 1 / inf = 0: all logits behind this token are 0.0, all finite, and their softmax is even. Greedy
#            decoding says token 0 there and then goes on; sampling says any token, with log-probability
#            -ln(vocabulary). NaN comes only where the values cannot be added up any more: of LayerNorm's mean at 3e38,
#            and of an infinite weight. A check for NaN sees less than half of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/overflow.py" <<'PROGRAM'
import math
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "bos_token_id": None}
torch.manual_seed(0)
models = {
    "RMSNorm": LlamaForCausalLM(LlamaConfig(**SMALL)).eval(),
    "LayerNorm": GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)
    ).eval(),
}
seen = {}
for name, model in models.items():
    sound = model.get_input_embeddings().weight[7].detach().clone()
    for value in (1e18, 1e20, 1e30, 3e38, math.inf):
        with torch.no_grad():
            model.get_input_embeddings().weight[7] = sound.sign() * value
            logits = model(torch.tensor([[3, 7]])).logits[0, -1]
            kind = "nan" if logits.isnan().all() else "zeros" if not logits.any() else "finite"
            seen[name, value] = kind
            print(f"{name:9} {value:8.0e}: {kind}, the largest is at {int(logits.argmax())}")
            if (name, value) == ("RMSNorm", 3e38):
                ids = model.generate(torch.tensor([[3, 7]]), max_new_tokens=5, do_sample=False)
                print("  generate:", ids[0, 2:].tolist())
                seen["first"] = int(ids[0, 2])
expected = {(name, value): "zeros" for name in models for value in (1e20, 1e30)}
expected |= {(name, 1e18): "finite" for name in models} | {(name, math.inf): "nan" for name in models}
expected |= {("RMSNorm", 3e38): "zeros", ("LayerNorm", 3e38): "nan", "first": 0}
sys.exit(0 if seen == expected else f"expected {expected}")
PROGRAM
"$folder/venv/bin/python" "$folder/overflow.py"
