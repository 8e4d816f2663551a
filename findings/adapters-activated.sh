#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     an activated LoRA (`alora_invocation_tokens`; its file is a LoRA's, "peft_type": "LORA") is on from where
#            its invocation tokens first stand in the row, and stays on. So keys and values of a row's beginning depend
#            on the tokens and the adapter, and a prefix cache whose key is both may give them to any row.
# Behaviour: it is on from the *last* invocation. In a conversation's second turn the first invocation and its answer
#            are read by the base, though they were computed and answered by the adapter a turn before: the same tokens,
#            the same adapter, other keys and values. What may be shared is the prefix up to the invocation, and that
#            with the base itself. Without an invocation, or with a part of one, there is no adapter at all. And a loop
#            of one's own that gives `past_key_values` and new tokens gets the base, without a word: only `generate`
#            remembers that there was an invocation before.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
cat >"$folder/activated.py" <<'PROGRAM'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
ASK = [50, 51]  # invokes the adapter
FIRST = [3, 4, 5, *ASK, 6, 7]
torch.manual_seed(0)
options = LoraConfig(
    r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=ASK
)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SMALL)), options).eval()
for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None


def read(ids, past=None):
    return model(torch.tensor([ids]), past_key_values=past, use_cache=True)


with torch.no_grad():
    seen = {}
    for what, ids in {
        "invoked": FIRST,
        "invoked again": [*FIRST, 8, *ASK, 9, 10],
        "not invoked": [3, 4, 5, 6, 7],
        "invoked by half": [3, 4, 5, 50, 6, 7],
    }.items():
        adapted = read(ids)
        with model.disable_adapter():
            differs = (adapted.logits - read(ids).logits).abs().amax(-1)[0] > 1e-4
        seen[what] = "".join("a" if each else "." for each in differs)
        print(f"{what:15} {ids}: read by the base (.) or the adapter (a): {seen[what]}")
    values = [read(ids).past_key_values.layers[0].values for ids in (FIRST, [*FIRST, 8, *ASK, 9, 10])]
    off = [float(each) for each in (values[0] - values[1][:, :, : len(FIRST)]).abs().amax((0, 1, 3))]
    print("the first turn's values, read alone and in the second turn, differ by", [f"{each:.1f}" for each in off])
    whole = read([*FIRST, 8]).logits[0, -1]
    begun = read(FIRST).past_key_values
    loop = float((read([8], begun).logits[0, -1] - whole).abs().max() / whole.abs().max())
    wanted = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    made = model.generate(input_ids=torch.tensor([FIRST]), max_new_tokens=2, **wanted)
    whole = read(made.sequences[0, :-1].tolist()).logits[0, -1]
    generated = float((made.logits[1][0] - whole).abs().max() / whole.abs().max())
print(f"logits behind cached tokens: off by {loop:.0e} of the largest in a loop, {generated:.0e} in `generate`")
is_so = seen == {
    "invoked": "...aaaa",
    "invoked again": "........aaaa",
    "not invoked": ".....",
    "invoked by half": "......",
}
is_so &= max(off[:3]) < 1e-5 and min(off[3:]) > 0.1 and loop > 0.1 and generated < 1e-4
sys.exit(0 if is_so else "adapters are activated otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/activated.py"
