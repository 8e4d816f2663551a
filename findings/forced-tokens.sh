#!/usr/bin/env bash
# Versions:  llguidance 1.9.1, tokenizers 0.23.1 (Python 3.11).
# Guess:     `LLMatcher.compute_ff_tokens` are the tokens of the text that a grammar forces, which is what
#            `compute_ff_bytes` returns: where bytes are forced, so are the tokens of the tokenizer that spell them.
# Behaviour: The tokens end earlier than the bytes, wherever the last ones might be one token with what may follow. Of
#            `{"title":"` they are `{"title` here, and once those are consumed there are none, although `":"` is forced
#            still. Where a whole answer is forced, both are the same. So a server that goes ahead by tokens leaves the
#            ends of forced texts to the model, and one that counts them finds less forced than there is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check llguidance==1.9.1 tokenizers==0.23.1 numpy
cat >"$folder/forced.py" <<'PROGRAM'
import json
import sys

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

trained = Tokenizer(models.BPE())
trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
trained.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
trained.train_from_iterator(['{"title":"a title","number":1}', '{"title":"","number":22}'] * 9, trainer)
tokenizer = LLTokenizer(trained.to_str())
schema = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
}
compact = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
whole = LLMatcher.grammar_from_lark('start: "a title"')
seen = []
for grammar in (compact, whole):
    matcher = LLMatcher(tokenizer, grammar)
    text, tokens = matcher.compute_ff_bytes(), matcher.compute_ff_tokens()
    assert matcher.consume_tokens(tokens)
    left, more = matcher.compute_ff_bytes(), matcher.compute_ff_tokens()
    print(f"forced {text}: tokens of {trained.decode(tokens)!r}; then {left}, tokens {more}")
    seen.append((text, trained.decode(tokens).encode(), left, more))
(object_text, object_tokens, left, more), (whole_text, whole_tokens, *_) = seen
is_so = object_text == b'{"title":"' and object_text.startswith(object_tokens) and object_tokens + left == object_text
is_so = is_so and left and not more and whole_tokens == whole_text
sys.exit(0 if is_so else "forced tokens spell all of the forced bytes now")
PROGRAM
"$folder/venv/bin/python" "$folder/forced.py"
