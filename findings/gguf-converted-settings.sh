#!/usr/bin/env bash
# Versions:  llama.cpp's converter of October 2026 (in the source package of llama-cpp-python 0.3.36, with its gguf),
#            transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     what a checkpoint's config.json says of its blocks is in the file that `convert_hf_to_gguf.py` makes of it:
#            a dense Nemotron-H is a `nemotron_h` whose MLP blocks have a feed_forward_length, and StarCoder2's file
#            names its sliding window, as Qwen's, Gemma's and Phi's do.
# Behaviour: neither. The converter reads config.json through AutoConfig, whose defaults make experts of a model that
#            has none: a dense Nemotron-H becomes a `nemotron_h_moe`, all feed_forward_lengths of which are 0, though its
#            tensors ffn_up and ffn_down are there. StarCoder2's window is left out without a word, so whoever computes
#            by the file alone attends to all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy \
  scikit-build-core==1.1.2 cmake
"$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --no-build-isolation \
  --no-binary llama-cpp-python -d "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-0.3.36.tar.gz -C "$folder"
cat >"$folder/convert.py" <<'PROGRAM'
import logging
import sys
import warnings
from pathlib import Path

sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
import gguf
import torch
import transformers
from conversion import get_model_class
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
logging.disable()
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
COMMON = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
folder = sys.argv[2]


def converted(name, config):
    """What the converter says of a model of random weights, and the names of its tensors."""
    torch.manual_seed(0)
    path = Path(folder) / name
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    made = get_model_class(config.architectures[0] if config.architectures else name)
    made.set_vocab = lambda self: self._set_vocab_none()  # tokens do not matter here
    out = path / "x.gguf"
    made(path, gguf.LlamaFileType.ALL_F32, out).write()
    reader = gguf.GGUFReader(out)
    said = {key: field.contents() for key, field in reader.fields.items()}
    return said, [each.name for each in reader.tensors]


blocks = ["linear_attention", "full_attention", "mlp"]
mixers = {"ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "head_dim": 16}
said, tensors = converted(
    "NemotronHForCausalLM", transformers.NemotronHConfig(**COMMON, **mixers, layers_block_type=blocks)
)
kind = said["general.architecture"]
widths = said[f"{kind}.feed_forward_length"]
print(f"Nemotron-H of {blocks}: {kind}, feed_forward_length {widths}")
print("  tensors of its MLP:", [each for each in tensors if ".ffn_" in each])
is_dense = kind == "nemotron_h" or any(widths) or "blk.2.ffn_up.weight" not in tensors
said, _ = converted("Starcoder2ForCausalLM", transformers.Starcoder2Config(**COMMON, num_hidden_layers=1, sliding_window=16))
windows = [key for key in said if "window" in key]
print("StarCoder2 with a sliding window of 16:", windows or "no key of a window")
sys.exit("converted files say more of their blocks now" if is_dense or windows else 0)
PROGRAM
"$folder/venv/bin/python" "$folder/convert.py" "$folder/llama_cpp_python-0.3.36/vendor/llama.cpp" "$folder/models"
