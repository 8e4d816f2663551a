#!/usr/bin/env bash
# Versions:  xgrammar 0.2.9, llguidance 1.9.1, jsonschema 4.26.0, transformers 5.23.0, torch 2.13.0 on a CPU
#            (Python 3.11).
# Guess:     `minLength` and `maxLength` bound how many characters a string has, and leave open which: a newline or a
#            quotation mark, written with its backslash, counts as one.
# Behaviour: llguidance does so. In xgrammar a string with either keyword has no backslash at all, so it can hold no
#            newline, tab, quotation mark or backslash; without the keyword it can. A tool whose "content" has
#            `minLength: 1`, so as not to be empty, takes no text of two lines and no code with a quotation mark. No
#            word is said when the schema is compiled, and what the model writes instead is valid.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 xgrammar==0.2.9 \
  llguidance==1.9.1 jsonschema==4.26.0 numpy
cat >"$folder/lengths.py" <<'PROGRAM'
import json
import sys

import llguidance
import xgrammar
from jsonschema import validate

END = 256  # after a token for each byte
BYTES = [bytes([value]) for value in range(END)]
VOCABULARY = xgrammar.TokenizerInfo([*BYTES, b"<end>"], xgrammar.VocabType.RAW, stop_token_ids=[END])


class Bytes:
    """A tokenizer of bytes, as llguidance wants one."""

    tokens, special_token_ids = [*BYTES, b"<end>"], [END]
    bos_token_id, eos_token_id = None, END

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def of_xgrammar(schema, text):
    compiled = xgrammar.GrammarCompiler(VOCABULARY).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(token) for token in (*text.encode(), END))


def of_llguidance(schema, text):
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


ANY, NOT_EMPTY, SHORT = {"type": "string"}, {"type": "string", "minLength": 1}, {"type": "string", "maxLength": 9}
seen = {}
for schema in (ANY, NOT_EMPTY, SHORT):
    for value in ("ab", "a\nb", "a\tb", 'a"b', "a\\b"):
        validate(value, schema)
        text = json.dumps(value)
        seen[json.dumps(schema), value] = of_xgrammar(schema, text), of_llguidance(schema, text)
        print(f"{json.dumps(schema):34} {text:7} xgrammar {seen[json.dumps(schema), value][0]!s:5}", end=" ")
        print("llguidance", seen[json.dumps(schema), value][1])
is_so = all(
    first == (value == "ab" or schema == json.dumps(ANY)) and second
    for (schema, value), (first, second) in seen.items()
)
sys.exit(0 if is_so else "lengths bound other strings now")
PROGRAM
"$folder/venv/bin/python" "$folder/lengths.py"
