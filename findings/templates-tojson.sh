#!/usr/bin/env bash
# Versions:  transformers 5.23.0, Jinja2 3.1.6, minijinja 3.1.0, xllamacpp 2026.10.11549 (llama.cpp), gguf 0.19.0
#            (Python 3.11 to 3.13).
# Guess:     a chat template is a Jinja template that comes with the model, so whoever renders it with Jinja, or with an
#            engine made for chat templates, gives the model the prompt that it was trained on: `tojson` is JSON.
# Behaviour: four engines write a tool in four ways, each of them JSON of the same value. transformers has a
#            `tojson` of its own: order as given, nothing escaped that JSON does not. Jinja's own sorts the keys, so a tool's
#            parameters come in another order and its "type" last, and writes ' < > & as \u0027 and so on, since it
#            is made for HTML; minijinja keeps the order and escapes likewise, so a description with an apostrophe is
#            other tokens. llama.cpp's does neither, but loses the ".0" of a whole number. What is printed without
#            `tojson` differs more: of a list llama.cpp prints the parts one after the other, of an object nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 jinja2==3.1.6 minijinja==3.1.0 \
  xllamacpp==2026.10.11549 gguf==0.19.0 numpy
cat >"$folder/render.py" <<'PROGRAM'
import json
import sys
import urllib.request

import minijinja
import numpy as np
import xllamacpp
from gguf import GGUFWriter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import render_jinja_template

WIDTH, TOKENS = 32, [*(chr(value) for value in range(33, 127)), "<end>"]
SCHEMA = {"type": "object", "properties": {"days": {"type": "number", "default": 1.0}}, "required": ["days"]}
FUNCTION = {"name": "weather", "description": "A city's <b>weather</b> & wind", "parameters": SCHEMA}
MESSAGES, TOOLS = [{"role": "user", "content": "Hello"}], [{"type": "function", "function": FUNCTION}]
TEMPLATES = {
    "tool | tojson": "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}",
    "a list": "{% for tool in tools or [] %}{{ tool.function.parameters.required }}{% endfor %}",
    "an object": "{% for tool in tools or [] %}{{ tool.function.parameters.properties }}{% endfor %}",
}


def write(path):
    """The smallest model that llama.cpp loads."""
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
        (writer.add_token_merges, ["a b"]),
        (writer.add_eos_token_id, len(TOKENS) - 1),
        (writer.add_bos_token_id, len(TOKENS) - 1),
    ):
        add(value)
    shapes = {name: (len(TOKENS), WIDTH) for name in ("token_embd", "output")} | {"output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{name}_norm": (WIDTH,) for name in ("attn", "ffn")}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (WIDTH, WIDTH) for name in names}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_llama_cpp(template):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.warmup = sys.argv[1], 64, 1, False
    options.chat_template, options.use_jinja, options.verbosity = template, True, 0
    server = xllamacpp.Server(options)
    body = json.dumps({"messages": MESSAGES, "tools": TOOLS}).encode()
    with urllib.request.urlopen(f"{server.listening_address}/apply-template", body) as answer:
        return json.load(answer)["prompt"]


write(sys.argv[1])
given = {"messages": MESSAGES, "tools": TOOLS}
seen = {}
for what, template in TEMPLATES.items():
    seen[what] = [
        render_jinja_template([MESSAGES], tools=TOOLS, chat_template=template)[0][0],
        ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template).render(given),
        minijinja.Environment(trim_blocks=True, lstrip_blocks=True).render_str(template, **given),
        of_llama_cpp(template),
    ]
    print(what)
    for engine, text in zip(("transformers", "Jinja2", "minijinja", "llama.cpp"), seen[what], strict=True):
        print(f"  {engine:12} {text}")
plain = json.dumps(TOOLS[0])
escaped = plain
for letter in "'<>&":
    escaped = escaped.replace(letter, f"\\u{ord(letter):04x}")
by_key = json.dumps(TOOLS[0], sort_keys=True)
for letter in "'<>&":
    by_key = by_key.replace(letter, f"\\u{ord(letter):04x}")
is_so = seen["tool | tojson"] == [plain, by_key, escaped, plain.replace("1.0", "1")]
is_so &= seen["a list"] == ["['days']", "['days']", "['days']", "days"] and seen["an object"][3] == ""
is_so &= len({str(json.loads(each)) for each in seen["tool | tojson"][::2]}) == 1
sys.exit(0 if is_so else "templates are rendered otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/render.py" "$folder/model.gguf"
