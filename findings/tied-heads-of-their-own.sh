#!/usr/bin/env bash
# Versions:  transformers 5.23.0, torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     with tie_word_embeddings true in config.json the head is the embedding: an lm_head.weight that the file has
#            besides is left out, as vLLM's loaders leave it out, and a reader may do the same.
# Behaviour: from_pretrained compares the two and ties only equal ones. One number that differs gives two matrices, with a
#            warning; config.tie_word_embeddings, from which others decide, remains true, also when such a model is
#            saved, with both. A file with the head alone gives its numbers to the embedding. What the model is, is told
#            by its tensors, not by its configuration.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/heads.py" <<'PROGRAM'
import sys
import tempfile

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
folder, again = tempfile.mkdtemp(), tempfile.mkdtemp()
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
path = f"{folder}/model.safetensors"
plain = load_file(path)
embedding = plain["model.embed_tokens.weight"]
changed = embedding.clone()
changed[3, 3] += 0.001
is_so = "lm_head.weight" not in plain
for said, head, has_embedding, is_tied in (
    ("an equal head", embedding.clone(), True, True),
    ("one number differs", changed, True, False),
    ("a head alone", changed, False, True),
):
    tensors = {**plain, "lm_head.weight": head}
    if not has_embedding:
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder)
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    model.save_pretrained(again)
    found = (first is last, torch.equal(last, head), model.config.tie_word_embeddings)
    has_head = "lm_head.weight" in load_file(f"{again}/model.safetensors")
    print(f"{said}: tied {found[0]}, the file's head {found[1]}, tied by its configuration {found[2]}, saved {has_head}")
    is_so &= found == (is_tied, True, True) and has_head != is_tied
sys.exit(0 if is_so else "heads of tied models are read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/heads.py" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
