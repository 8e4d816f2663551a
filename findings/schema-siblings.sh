#!/usr/bin/env bash
# Versions:  xgrammar 0.2.9, jsonschema 4.26.0, torch 2.13.0, transformers 5.23.0 on a CPU (Python 3.11 to 3.13).
# Guess:     a keyword that xgrammar enforces it enforces wherever it stands; one that it cannot is an error when the
#            schema is compiled.
# Behaviour: `minimum`, `type` and `required` are enforced where they stand alone, and dropped without a word beside
#            `$ref`, `enum` or `anyOf`, where JSON Schema has all of them hold: so "one of b or c must be there",
#            written as `anyOf` beside `properties`, is no condition. `multipleOf` and `minProperties` are enforced;
#            `uniqueItems`, `contains`, `not` and `dependentRequired` are dropped, without a word as well.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check xgrammar==0.2.9 jsonschema==4.26.0 torch==2.13.0 \
  transformers==5.23.0 numpy
cat >"$folder/siblings.py" <<'PROGRAM'
import json
import sys

import jsonschema
import xgrammar

END = 128
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*map(chr, range(128)), "<end>"], stop_token_ids=[END]))
NUMBER, LIST = {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}
PAIR = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "additionalProperties": False}
ANY = {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}
# a schema, what it allows and what it forbids
ENFORCED = {
    "minimum": (NUMBER | {"minimum": 3}, 4, 1),
    "required": (PAIR | {"required": ["b"]}, {"b": 1}, {"a": 1}),
    "multipleOf": (NUMBER | {"multipleOf": 5}, 10, 12),
    "minProperties": (PAIR | {"minProperties": 1}, {"a": 1}, {}),
}
DROPPED = {
    "minimum beside $ref": ({"$defs": {"n": NUMBER}, "$ref": "#/$defs/n", "minimum": 3}, 4, 1),
    "maximum beside enum": ({"enum": [1, 5], "maximum": 3}, 1, 5),
    "type beside enum": ({"type": "string", "enum": ["a", None]}, "a", None),
    "anyOf of required beside properties": (PAIR | ANY, {"a": 1, "b": 2}, {"a": 1}),
    "uniqueItems": (LIST | {"uniqueItems": True}, [1, 2], [1, 1]),
    "contains": (LIST | {"contains": {"const": 7}}, [1, 7], [1, 2]),
    "not": (NUMBER | {"not": {"const": 5}}, 4, 5),
    "dependentRequired": (PAIR | {"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}),
}


def allows(schema, value):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    return matcher.accept_string(json.dumps(value)) and matcher.accept_token(END)


seen = {}
for name, (schema, right, wrong) in (ENFORCED | DROPPED).items():
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(right) and not validator.is_valid(wrong)
    seen[name] = (allows(schema, right), allows(schema, wrong))
    print(f"{name:36} valid {json.dumps(right)}: {seen[name][0]}; invalid {json.dumps(wrong)}: {seen[name][1]}")
expected = dict.fromkeys(ENFORCED, (True, False)) | dict.fromkeys(DROPPED, (True, True))
sys.exit(0 if seen == expected else "keywords are enforced otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/siblings.py"
