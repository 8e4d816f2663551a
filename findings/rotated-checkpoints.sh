#!/usr/bin/env bash
# Versions:  compressed-tensors 0.20.0, transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     `from_pretrained` loads what compressed-tensors has saved, or refuses it. A checkpoint that was rotated
#            before it was quantised (QuIP, SpinQuant: `transform_config`) turns a layer's input by a Hadamard matrix
#            while the model runs, since its weights are turned the other way; transformers needs compressed-tensors to
#            load it, which has `apply_transform_config` for this.
# Behaviour: transformers never looks at `transform_config`. It loads the turned weights, gives them inputs that are
#            not, and the logits are off by as much as they are large, with `dequantize=True` and without. That the
#            file's matrices find no place is a line of the report of loading ("can be ignored when loading from
#            different task/architecture"). With `apply_transform_config` for the inputs alone, by hand, it is right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
  compressed-tensors==0.20.0 accelerate==1.15.0 numpy
cat >"$folder/rotated.py" <<'PROGRAM'
import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, logging

logging.set_verbosity_error()
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
IDS = torch.arange(5, 20)[None]
LAYERS = {"targets": ["Linear"], "ignore": ["lm_head"]}
INPUTS = TransformArgs(location="input", **LAYERS)
WEIGHTS = TransformArgs(location="weight_input", inverse=True, **LAYERS)
saved = Path(sys.argv[1])


def rotations(*places):
    return TransformConfig(config_groups={"v": TransformScheme(type="hadamard", apply=list(places))})


def save(is_rotated):
    """Save a model of 8-bit weights; gives back its logits, and how far they are from those before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()
    before = model(IDS).logits
    if is_rotated:
        apply_transform_config(model, rotations(INPUTS, WEIGHTS))
    weights = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format="int-quantized")
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen")
    )
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.copy_(module.weight.abs().amax(1, keepdim=True) / 127)
    logits = model(IDS).logits
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(saved)
    compressor.update_config(saved)
    return logits, off(logits, before)


def off(logits, right):
    return float((logits - right).abs().max() / right.abs().max())


seen = {}
with torch.no_grad():
    for is_rotated in (False, True):
        right, by_rounding = save(is_rotated)
        told = json.loads((saved / "config.json").read_text())["quantization_config"]["transform_config"]
        assert bool(told) == is_rotated
        print("rotated" if is_rotated else "as it was", f"and quantised: off by {by_rounding:.0e} of the largest logit")
        seen["rounding", is_rotated] = by_rounding
        for dequantize in (False, True):
            given = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
            model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, **given).eval()
            seen[dequantize, is_rotated] = off(model(IDS).logits, right)
            print(f"  loaded, dequantize={dequantize}: off by {seen[dequantize, is_rotated]:.0e}")
    apply_transform_config(model, rotations(INPUTS))
    seen["by hand"] = off(model(IDS).logits, right)
    print(f"  with inputs turned by hand: off by {seen['by hand']:.0e}")
is_so = seen["rounding", False] < 0.1 and seen["rounding", True] < 0.1 and seen["by hand"] < 1e-4
is_so &= all(seen[dequantize, False] < 1e-4 and seen[dequantize, True] > 0.5 for dequantize in (False, True))
sys.exit(0 if is_so else "rotated checkpoints are loaded otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/rotated.py" "$folder/checkpoint"
