#!/usr/bin/env bash
# Versions:  transformers 5.23.0, tokenizers 0.23.3 (Python 3.11).
# Guess:     a tokenizer's ids of a pair of texts do not depend on whether it is asked for one pair or for a list of
#            pairs. So a cross-encoder's score of a query and an empty document (a page without text, an empty field) is
#            the same from a program that scores one pair at a time as from one that scores a batch.
# Behaviour: for one pair an empty second text is as none: no second separator, no tokens of the second type. In a list
#            it is a pair. Both are valid calls, and nothing warns; the two inputs have other lengths, so a model gives
#            them other scores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cat >"$folder/pairs.py" <<'PROGRAM'
import sys

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "text"])}
backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
found = {}
for second in ("text", ""):
    one = tokenizer("query", second)["input_ids"]
    several = tokenizer(["query"], [second])["input_ids"][0]
    found[second] = one == several
    print(f"('query', {second!r}): one pair {one}, in a list {several}, backend {backend.encode('query', second).ids}")
sys.exit(0 if found == {"text": True, "": False} else "pairs with an empty text are read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/pairs.py"
