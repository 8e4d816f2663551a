#!/usr/bin/env bash
# Versions:  llguidance 1.9.1, xgrammar 0.2.9, jsonschema 4.26.0, transformers 5.23.0, torch 2.13.0 on a CPU
#            (Python 3.11).
# Guess:     a bound of a number, as `minimum: 0`, takes away numbers, not ways to write them: "1e-3" and "1.5e3" are
#            still there, as they are for a number without bounds.
# Behaviour: in both libraries a number with any bound has no exponent, and in xgrammar six decimals at most. A model
#            that is about to write a learning rate of 1e-5 has written its "1" when it learns that no "e" may follow:
#            1 is a number within the bounds, so no validator of answers notices. And between 0 and 0.000001 there is
#            nothing that xgrammar lets it say, `exclusiveMinimum: 0` or not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 xgrammar==0.2.9 \
  llguidance==1.9.1 jsonschema==4.26.0 numpy
cat >"$folder/exponents.py" <<'PROGRAM'
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


FREE, BOUND = {"type": "number"}, {"type": "number", "minimum": 0}
BETWEEN = {"type": "number", "exclusiveMinimum": 0, "maximum": 2000}
seen = {}
for schema in (FREE, BOUND, BETWEEN):
    for text in ("0.001", "1e-3", "1.5e3", "0.000001", "0.0000001"):
        validate(json.loads(text), schema)
        seen[json.dumps(schema), text] = of_llguidance(schema, text), of_xgrammar(schema, text)
        print(f"{json.dumps(schema):60} {text:9} llguidance {seen[json.dumps(schema), text][0]!s:5}", end=" ")
        print("xgrammar", seen[json.dumps(schema), text][1])
is_so = all(
    first == ("e" not in text or schema == json.dumps(FREE))
    and second == (text in ("0.001", "0.000001") or schema == json.dumps(FREE))
    for (schema, text), (first, second) in seen.items()
)
sys.exit(0 if is_so else "bounds leave other ways to write a number now")
PROGRAM
"$folder/venv/bin/python" "$folder/exponents.py"
