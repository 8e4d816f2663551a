#!/usr/bin/env bash
# Versions:  peft 0.21.2, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     an adapter of a model with experts (`target_parameters`, as transformers 5 holds all experts of a layer in
#            one parameter) says in its tensors' names which parameter they are of, and both factors have the experts
#            one after the other: A is [experts * r, in], B is [out, experts * r].
# Behaviour: no name has the parameter in it. Adapted alone, `gate_up_proj` and `down_proj` are both saved as
#            `experts.lora_A.weight`, and only adapter_config.json tells them apart; adapted together, the first of the
#            module's parameters is `experts.base_layer.lora_A.weight`, whatever order they are asked for in. And the
#            factors lie differently: A's rows are expert by expert, B's columns are rank by rank (column r * E + e).
#            A loader that cuts both alike gets other matrices of the right shapes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check peft==0.21.2 torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/experts.py" <<'PROGRAM'
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM, logging

logging.set_verbosity_error()
warnings.simplefilter("ignore")
EXPERTS, RANK = 4, 3
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
PREFIX = "base_model.model.model.layers.0.mlp."
UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
folder = Path(sys.argv[1])


def adapted(parameters):
    """The tensors of a random adapter of these parameters, and what merging it adds to each."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SMALL))
    before = {name: value.clone() for name, value in model.state_dict().items() if "experts" in name}
    options = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=parameters)
    model = get_peft_model(model, options)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.2) if "lora_" in name else None
    model.save_pretrained(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): value for name, value in saved.items()}
    merged = model.merge_and_unload().state_dict()
    return tensors, {name.rpartition(".")[2]: merged[name] - value for name, value in before.items()}


seen = {}
for parameters in ([UP], [DOWN], [UP, DOWN], [DOWN, UP]):
    tensors, added = adapted(parameters)
    names = seen[tuple(parameters)] = {name: tuple(tensors[name].shape) for name in sorted(tensors)}
    print(" and ".join(each.rpartition(".")[2] for each in parameters), "->", names)
is_so = set(seen[UP,]) == set(seen[DOWN,]) == {"experts.lora_A.weight", "experts.lora_B.weight"}
is_so &= seen[UP, DOWN] == seen[DOWN, UP] and "experts.base_layer.lora_A.weight" in seen[UP, DOWN]
for which, infix in (("gate_up_proj", "base_layer."), ("down_proj", "")):
    a, b = (tensors[f"experts.{infix}lora_{each}.weight"] for each in "AB")
    a = a.reshape(EXPERTS, RANK, -1)
    cuts = {"alike": b.reshape(-1, EXPERTS, RANK).permute(1, 0, 2)}
    cuts["rank by rank"] = b.reshape(-1, RANK, EXPERTS).permute(2, 0, 1)
    off = {cut: float((torch.bmm(each, a) - added[which]).abs().max()) for cut, each in cuts.items()}
    print(f"{which}, B cut", ", ".join(f"{cut}: off by {value:.1e}" for cut, value in off.items()))
    is_so &= off["alike"] > 0.1 and off["rank by rank"] < 1e-5
sys.exit(0 if is_so else "adapters of experts are saved otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/experts.py" "$folder/adapter"
