#!/usr/bin/env bash
# Versions:  xllamacpp 2026.10.11549 (llama.cpp), gguf 0.19.0 (Python 3.11 to 3.13).
# Guess:     llama.cpp ends an answer at the tokens that the file names (`tokenizer.ggml.eos_token_id`, `eot_token_id`,
#            `eom_token_id`), and goes on after any other; so an engine that serves the same file by these ids gives the
#            same answers.
# Behaviour: it goes through the vocabulary by text. A token called <|im_end|>, <|eot_id|>, <end_of_turn>, <|return|>,
#            <|call|>, </s>, <EOT> and more ends every answer, whatever the file says the end is and whatever kind of
#            token it is: control, user-defined, or an ordinary piece of the vocabulary, such as the end of HTML's <s>,
#            which code has. Nothing of the token is in the answer and the stop's type is "eos"; of tokens that are not
#            control ones a warning at loading tells. One with another name (<tool>, <|end_of_answer|>) ends nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check xllamacpp==2026.10.11549 gguf==0.19.0 numpy
cat >"$folder/ends.py" <<'PROGRAM'
import json
import sys
import urllib.request

import numpy as np
import xllamacpp
from gguf import GGUFWriter, TokenType

NAMED = "<|endoftext|>"
ENDS = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|return|>", "<|call|>", "</s>", "<EOT>"]
OTHERS = ["<tool>", "<|end_of_answer|>", "<|im_start|>", "</b>"]
MARKS = [*ENDS, *OTHERS]
TOKENS = [*(chr(value) for value in range(33, 127)), *MARKS, NAMED]
WIDTH, BLOCK = 32, "blk.0."


def write(path, kind):
    """A model in whose vocabulary the marks are tokens of this kind."""
    writer = GGUFWriter(path, "llama")
    kinds = [TokenType.NORMAL] * (len(TOKENS) - len(MARKS) - 1) + [kind] * len(MARKS) + [TokenType.CONTROL]
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
        (writer.add_token_types, kinds),
        (writer.add_token_merges, ["a b"]),
        (writer.add_eos_token_id, TOKENS.index(NAMED)),
        (writer.add_bos_token_id, TOKENS.index(NAMED)),
        (writer.add_add_bos_token, False),
    ):
        add(value)
    random = np.random.default_rng(0)
    shapes = {name: (len(TOKENS), WIDTH) for name in ("token_embd", "output")} | {"output_norm": (WIDTH,)}
    shapes |= {f"{BLOCK}{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"{BLOCK}{name}": (WIDTH, WIDTH) for name in names}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(path):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = path, 64, 1, False
    options.verbosity = 0
    return xllamacpp.Server(options)


seen = {}
for kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL):
    write(sys.argv[1], kind)
    server = serve(sys.argv[1])
    for mark in [NAMED, *MARKS]:  # which a bias makes the model say three times
        body = {"prompt": "a", "n_predict": 3, "temperature": 0, "logit_bias": [[TOKENS.index(mark), 1000.0]]}
        with urllib.request.urlopen(f"{server.listening_address}/completion", json.dumps(body).encode()) as answer:
            told = json.load(answer)
        seen[kind.name, mark] = told["stop_type"] == "eos" and told["tokens_predicted"] == 1
    ending = [mark for mark in MARKS if seen[kind.name, mark]]
    print(f"{kind.name:12} the file names {NAMED}; ends too:", *ending)
    del server
is_so = all(does_end == (mark not in OTHERS) for (_, mark), does_end in seen.items())
sys.exit(0 if is_so else "other tokens end an answer now")
PROGRAM
"$folder/venv/bin/python" "$folder/ends.py" "$folder/model.gguf"
