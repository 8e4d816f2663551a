#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11).
# Guess:     how an adapter was initialised matters to its training alone. What is saved is A and B, and the model is
#            the base with scaling * B A added, whatever `init_lora_weights` says.
# Behaviour: with "pissa" and "olora" peft takes the first product out of the base's weights when it sets the adapter
#            up, and the saved A and B go with that other base, which is saved nowhere: peft makes it again at loading,
#            since adapter_config.json still says "pissa". An engine that adds B A to the base as published counts the
#            first product twice, and its logits are off by as much as they are large, with every shape right. Saving
#            warns; who only has the files is told by `init_lora_weights` alone. Who trains can save an adapter of twice
#            the rank for the base as published, given the untrained one (`path_initial_model_for_weight_conversion`).
#            For "gaussian", "orthogonal" and the default the guess holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 peft==0.21.2 numpy
cat >"$folder/initialised.py" <<'PROGRAM'
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, logging

warnings.simplefilter("ignore")
logging.set_verbosity_error()
logging.disable_progress_bar()
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
RANK, ALPHA = 4, 8
IDS = torch.arange(5, 20)[None]


def base():
    """The model as published."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 else None
    return model


def added(saved):
    """The base as published with each scaling * B A of a saved adapter added."""
    tensors = load_file(saved / "adapter_model.safetensors")
    config = json.loads((saved / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    model = base()
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.weight += scaling * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return model


seen = {}
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    for start in (True, "gaussian", "orthogonal", "pissa", "olora"):
        untrained, saved, converted = (Path(folder) / str(start) / name for name in ("untrained", "saved", "converted"))
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"], init_lora_weights=start)
        model = get_peft_model(base(), config)
        if takes_out := start in ("pissa", "olora"):
            model.peft_config["default"].init_lora_weights = True  # so that nothing is taken out of the base twice
            model.save_pretrained(untrained)
            model.peft_config["default"].init_lora_weights = start
        for name, parameter in model.named_parameters():  # trained a little
            parameter.add_(0.1 * torch.randn(parameter.shape)) if "lora_" in name else None
        trained = model(IDS).logits
        model.save_pretrained(saved)
        logits = {"loaded by peft": PeftModel.from_pretrained(base(), saved)(IDS).logits}
        logits["added to the base"] = added(saved)(IDS).logits
        if takes_out:
            model.save_pretrained(converted, path_initial_model_for_weight_conversion=untrained)
            logits["converted and added"] = added(converted)(IDS).logits
        seen[start] = {how: float((each - trained).abs().max() / trained.abs().max()) for how, each in logits.items()}
        print(f"{start!s:10}", *(f"{how} {share:.0e}," for how, share in seen[start].items()))
is_so = all(
    (share > 0.1) == (start in ("pissa", "olora") and how == "added to the base")
    for start, shares in seen.items()
    for how, share in shares.items()
)
sys.exit(0 if is_so else "adapters so initialised are saved otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/initialised.py"
