#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     `trainable_token_indices`, with which an adapter learns a few tokens of its own (the marks of a tool call),
#            saves a tensor `trainable_tokens_delta` of one row to a token: the difference to the base's row, as the
#            name says and as everything else in an adapter is, so an engine adds it.
# Behaviour: it is the whole new row, which takes the place of the base's: untrained it is a copy, so adding it doubles
#            the row. Neither a scaling nor `lora_alpha` applies to it. The tensor does not say which tokens it is of:
#            its rows are in the order of adapter_config.json's list, which need not be ascending. And where the head
#            is tied to the embedding, the head has the new rows too, though the file names the embedding alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
cat >"$folder/tokens.py" <<'PROGRAM'
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
TOKENS = [9, 4]
IDS = torch.tensor([[3, 9, 4, 20, 4]])


def base():
    """The model as published."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


with torch.no_grad():
    config = LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": TOKENS})
    model = get_peft_model(base(), config).eval()
    rows = next(each for name, each in model.named_parameters() if "trainable_tokens_delta" in name)
    is_copy = torch.equal(rows, base().model.embed_tokens.weight[TOKENS])
    rows.add_(torch.randn(rows.shape))  # trained
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = load_file(Path(saved) / "adapter_model.safetensors")
        wanted = PeftModel.from_pretrained(base(), saved).eval()(IDS).logits
    names = [name for name in tensors if "lora_" not in name]
    delta = tensors[names[0]]
    seen = {}
    for how in ("added", "put in place, ascending", "put in place", "put in place, embedding only"):
        engine = base()
        if "only" in how:
            engine.lm_head.weight = torch.nn.Parameter(engine.lm_head.weight.clone())
        weight = engine.model.embed_tokens.weight
        weight[sorted(TOKENS) if "ascending" in how else TOKENS] = weight[TOKENS] + delta if how == "added" else delta
        seen[how] = float((engine(IDS).logits - wanted).abs().max() / wanted.abs().max())
print("in the file beside the factors:", *names, tuple(delta.shape))
print("untrained, it is a copy of the base's rows:", is_copy)
for how, share in seen.items():
    print(f"{how}: logits off by {share:.0e} of the largest")
is_so = is_copy and len(names) == 1 and all((share < 1e-5) == (how == "put in place") for how, share in seen.items())
sys.exit(0 if is_so else "an adapter's tokens are saved otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/tokens.py"
