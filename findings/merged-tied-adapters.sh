#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     `merge_and_unload` gives a model that says what the model with its adapter said. Where the head is tied to
#            the input embedding, peft warns that an adapter of one of them may be merged wrongly, and recommends
#            `ensure_weight_tying=True`; with that the guess holds again.
# Behaviour: with the option the two layers share one pair of factors, and the merge adds their product to the one
#            shared weight twice, once for each layer. The logits of the merged model are off by as much as they are
#            large; merged by hand, once, they are equal. Without the tie the merge is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check peft==0.21.2 torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/merge.py" <<'PROGRAM'
import sys
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
warnings.simplefilter("ignore")
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.arange(5, 19)[None]


def base(is_tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=is_tied)).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def share(seen, right):
    return float((seen - right).abs().max() / right.abs().max())


seen = {}
for is_tied in (False, True):
    options = LoraConfig(r=4, lora_alpha=4, target_modules=["lm_head"], ensure_weight_tying=is_tied)
    model = get_peft_model(base(is_tied), options).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2) if "lora_" in name else None
    right = logits(model)
    head = model.base_model.model.lm_head
    update = (head.lora_B["default"].weight @ head.lora_A["default"].weight).detach()
    by_hand = base(is_tied)
    with torch.no_grad():
        by_hand.lm_head.weight += update
    merged = model.merge_and_unload()
    added = merged.lm_head.weight.detach() - base(is_tied).lm_head.weight.detach()
    times = float((added * update).sum() / update.square().sum())
    seen[is_tied] = (share(logits(merged), right), share(logits(by_hand), right), round(times, 3))
    off = f"off by {seen[is_tied][0]:.1e}, by hand {seen[is_tied][1]:.1e}"
    print(f"tied: {is_tied!s:5}  merged: {off}; added {times:.3f} times")
untied, tied = seen[False], seen[True]
is_so = untied[0] < 1e-4 and untied[2] == 1 and tied[0] > 0.1 and tied[1] < 1e-4 and tied[2] == 2
sys.exit(0 if is_so else "tied adapters are merged otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/merge.py"
