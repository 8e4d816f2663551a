#!/usr/bin/env bash
# Versions:  llguidance 1.9.1, xgrammar 0.2.9, outlines-core 0.2.14, jsonschema 4.26.0, transformers 5.23.0,
#            torch 2.13.0 on a CPU (Python 3.11 to 3.13).
# Guess:     a `pattern` of a tool's schema is searched for in the string, as JSON Schema says: "^https?://" is a string
#            that begins so. Libraries that make grammars of schemas agree, or refuse the pattern.
# Behaviour: llguidance searches. xgrammar and outlines-core take it for the whole string. With xgrammar a model can
#            write "http://" or "https://" and nothing behind it, without a word. Of a pattern with one anchor
#            outlines-core makes a regular expression without a word, of which no index can be built, and blames the
#            vocabulary; of "^a|b$" it makes ("a|b"), which ends a string without its quote or begins one without: no
#            JSON. Short of that what is written is valid, so no validator of answers notices what cannot be said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1 xgrammar==0.2.9 outlines-core==0.2.14 \
  jsonschema==4.26.0 torch==2.13.0 transformers==5.23.0 numpy
cat >"$folder/patterns.py" <<'PROGRAM'
import json
import sys

import jsonschema
import llguidance.hf
import xgrammar
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = 128
ASCII = [chr(code) for code in range(128)]


def tokenizer():
    """One token to a byte, of ASCII."""
    names = pre_tokenizers.ByteLevel.alphabet()
    # GPT-2's names of bytes: printable ones are themselves, the others count on from 256
    of = {code: chr(code) if 33 <= code < 127 else None for code in range(128)}
    spare = iter(chr(256 + at) for at in range(128))
    of = {code: name or next(spare) for code, name in of.items()}
    assert set(of.values()) <= set(names)
    made = Tokenizer(models.BPE({name: code for code, name in of.items()}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


library = llguidance.hf.from_tokenizer(tokenizer())
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*ASCII, "<end>"], stop_token_ids=[END]))
vocabulary = Vocabulary(END, {each: [ord(each)] for each in ASCII})


def of_llguidance(schema, text):
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_json_schema(schema))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def of_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    return matcher.accept_string(text) and matcher.accept_token(END)


def of_outlines(schema, text):
    try:
        guide = Guide(Index(build_regex_from_schema(json.dumps(schema)), vocabulary))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"[:50]
    for each in text.encode():
        if each not in guide.get_tokens():
            return False
        guide.advance(each)
    return END in guide.get_tokens()


LIBRARIES = {"llguidance": of_llguidance, "xgrammar": of_xgrammar, "outlines-core": of_outlines}
TEXTS = {"^https?://": ("http://", "http://a.b"), "b": ("b", "abc"), "^a|b$": ("a", "ax", "xb"), "^a.*$": ("a", "abc")}
seen = {}
for pattern, texts in TEXTS.items():
    schema = {"type": "string", "pattern": pattern}
    for text in texts:
        jsonschema.validate(text, schema)
        said = {name: each(schema, json.dumps(text)) for name, each in LIBRARIES.items()}
        seen[pattern, text] = tuple(each is True for each in said.values())
        print(f"{pattern:11} {text!r:13}", *(f"{name}: {each}" for name, each in said.items()))
half = of_outlines({"type": "string", "pattern": "^a|b$"}, '"a')
print("outlines-core ends ^a|b$ behind", '"a:', half)
expected = dict.fromkeys(seen, (True, False, False))
expected |= {("^https?://", "http://"): (True, True, False), ("^a|b$", "a"): (True, True, False)}
expected |= dict.fromkeys([("b", "b"), ("^a.*$", "a"), ("^a.*$", "abc")], (True, True, True))
is_so = seen == expected and half is True
sys.exit(0 if is_so else "patterns are taken otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/patterns.py"
