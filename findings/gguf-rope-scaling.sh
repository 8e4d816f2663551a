#!/usr/bin/env bash
# Versions:  transformers 5.23.0, gguf 0.19.0, accelerate 1.15.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     `from_pretrained(folder, gguf_file=...)` takes over how a file says that its positions are stretched, or
#            refuses it: linear and YaRN by the metadata `llama.rope.scaling.*`, Llama 3.1's by the tensor
#            `rope_freqs.weight`, which divides the frequencies.
# Behaviour: all three are dropped. The model has the frequencies of `rope.freq_base` alone (rope_type "default"), so it
#            reads each position otherwise than it was trained to, from the second token on. A base other than 10,000
#            is taken over.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 \
  gguf==0.19.0 accelerate==1.15.0 numpy
cat >"$folder/rope.py" <<'PROGRAM'
import os
import sys
import warnings

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, logging

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.simplefilter("ignore")
VOCAB, HIDDEN, HEADS, HEAD_DIM = 32, 64, 4, 16
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)


def frequencies(name, base=10_000.0, scaling=None, freqs=None):
    """The model's rotary frequencies and its rope_parameters, from a file that is written first."""
    writer = gguf.GGUFWriter(f"{folder}/{name}", "llama")
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_freq_base(base)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)
    random = np.random.default_rng(0)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {f"blk.0.{each}.weight": (HIDDEN, HIDDEN) for each in matrices} | {"token_embd.weight": (VOCAB, HIDDEN)}
    for tensor, shape in shapes.items():
        writer.add_tensor(tensor, random.normal(0, 0.2, shape).astype(np.float32))
    for tensor in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(tensor, np.ones(HIDDEN, np.float32))
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)
    print(f"{name:12} {model.config.rope_parameters}")
    return model.model.rotary_emb.inv_freq.double()


plain = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
seen = {
    "linear.gguf": frequencies("linear.gguf", scaling=gguf.RopeScalingType.LINEAR),
    "yarn.gguf": frequencies("yarn.gguf", scaling=gguf.RopeScalingType.YARN),
    "freqs.gguf": frequencies("freqs.gguf", freqs=[1, 1, 1, 1, 2, 4, 8, 8]),
}
dropped = {name for name, each in seen.items() if torch.allclose(each, plain)}
based = frequencies("base.gguf", base=500_000.0)
print("as without scaling:", sorted(dropped))
is_so = len(dropped) == 3 and not torch.allclose(based, plain)
sys.exit(0 if is_so else "scaled positions of GGUF files are read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/rope.py" "$folder/files"
