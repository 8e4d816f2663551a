#!/usr/bin/env bash
# Versions:  xllamacpp 2026.10.11549 (llama.cpp on a CPU), gguf 0.19.0 (Python 3.11 to 3.13).
# Guess:     a tensor's type in a GGUF file says how its weights are stored. A product's other side is float32, as all
#            activations of llama.cpp are, so logits are those of the dequantised weights but for roundings of 1e-6, and
#            a BF16 checkpoint whose weights all fit into F16 may be converted to F16 without loss.
# Behaviour: on a CPU the activations are cast to a type that goes with the weights': to F16, to BF16, or for Q8_0 and
#            Q4_0 to 8 bits with a scale to 32 of them. So products with F16 weights, of which each is an exact float32,
#            overflow where an activation is beyond 65,504: every logit is NaN, though the right logits are small and
#            the same weights as F32, BF16 or Q8_0 give them. And a file's error is not its weights' alone: beside their
#            dequantised weights Q8_0 and Q4_0 are off a second time, a product by as much as 1e-2, BF16 likewise, where
#            float32 is off by 1e-6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy
cat >"$folder/activations.py" <<'PROGRAM'
import json
import math
import sys
import urllib.request

import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

WIDTH, TOKENS = 64, [chr(value) for value in range(33, 127)] + ["<end>"]
END, BLOCK = len(TOKENS) - 1, "blk.0."
path = sys.argv[1]
random = np.random.default_rng(0)
embedding = random.standard_normal((len(TOKENS), WIDTH)).astype(np.float32)
head = (0.3 * random.standard_normal((len(TOKENS), WIDTH))).astype(np.float32)


def write(kind, norm):
    """A model whose only layer adds nothing, with a head of this type; gives back the head's numbers."""
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, WIDTH),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, WIDTH),
        (writer.add_head_count, 2),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, TOKENS),
        (writer.add_token_types, [1] * END + [3]),
        (writer.add_token_merges, ["a b"]),
        (writer.add_eos_token_id, END),
        (writer.add_bos_token_id, END),
        (writer.add_add_bos_token, False),
    ):
        add(value)
    stored = quantize(head / norm, kind)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output_norm.weight", np.full(WIDTH, norm, np.float32))
    writer.add_tensor("output.weight", stored, raw_dtype=kind)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"{BLOCK}{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"{BLOCK}{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dequantize(stored, kind).astype(np.float64)


def served():
    """The log-probabilities of all tokens behind an "a"."""
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = path, 64, 1, False
    options.verbosity = 0
    server = xllamacpp.Server(options)
    body = {"prompt": "a", "n_predict": 1, "temperature": 0, "n_probs": len(TOKENS)}
    with urllib.request.urlopen(f"{server.listening_address}/completion", json.dumps(body).encode()) as answer:
        tops = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    by_id = {each["id"]: each["logprob"] for each in tops}
    return np.array([math.nan if by_id[n] is None else by_id[n] for n in range(len(TOKENS))])


off, largest = {}, {}
for norm in (1.0, 2.0**16):
    for kind in (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0):
        weights = write(kind, norm)
        row = embedding[TOKENS.index("a")].astype(np.float64)
        row *= norm / np.sqrt((row * row).mean() + 1e-5)
        logits = weights @ row
        right = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        off[kind.name, norm] = float(np.abs(served() - right).max())
        print(f"{kind.name:5} activations to {np.abs(row).max():8.1f}, weights to {np.abs(weights).max():.1e}:", end=" ")
        print(f"log-probabilities, of up to {np.abs(right).max():.0f}, off by {off[kind.name, norm]:.0e}")
        largest[kind.name, norm] = float(np.abs(right).max())
is_so = math.isnan(off.pop(("F16", 2.0**16))) and max(largest.values()) < 50
is_so &= all(each < 1e-4 if kind == "F32" else each > 3e-4 for (kind, _), each in off.items())
sys.exit(0 if is_so else "activations are cast otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/activations.py" "$folder/model.gguf"
