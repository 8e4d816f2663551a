#!/usr/bin/env bash
# Versions:  tokenizers 0.23.3, tiktoken 0.14.0 (Python 3.11 to 3.13).
# Guess:     the text of an added token comes back from `decode` as it was added: it is no piece of the model, so how
#            the model's own pieces spell bytes does not matter to it. "<｜User｜>", of DeepSeek's wide bars, shows it.
# Behaviour: the byte-level decoder reads each token's text by its own alphabet, added ones too, and takes the text as
#            it is only where some letter of it is outside of that alphabet. Its alphabet has all of Latin-1 that can be
#            seen, so the mark of a call "«call»", a "§1" or a "<schlüssel>" become bytes that are no UTF-8, and U+FFFD,
#            and "<Ġ>" a blank. One wide bar more and the same umlaut is right. A marker searched for in the text is not
#            there, while the ids are right. tiktoken decodes the same tokens as they were given. `DecodeStream`, which
#            waits while a text ends in U+FFFD, gives "«call»" out with the next token, and at an answer's end never.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3 tiktoken==0.14.0
cat >"$folder/decoded.py" <<'PROGRAM'
import sys

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

ADDED = ["<tool>", "<｜User｜>", "→go", "<｜schlüssel｜>", "«call»", "§1", "<schlüssel>", "<Ġ>"]
BROKEN = {"«call»": "\ufffdcall\ufffd", "§1": "\ufffd1", "<schlüssel>": "<schl\ufffdssel>", "<Ġ>": "< >"}
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
other = tiktoken.Encoding(
    "bytes",
    pat_str=r"[\s\S]",
    mergeable_ranks={bytes([value]): value for value in range(256)},
    special_tokens={text: 256 + index for index, text in enumerate(ADDED)},
)
is_so = True
for text in ADDED:
    given = f"a{text}b"
    ids, others = tokenizer.encode(given).ids, other.encode(given, allowed_special="all")
    assert len(ids) == len(others) == 3
    stream = DecodeStream(skip_special_tokens=False)
    streamed = [stream.step(tokenizer, each) for each in ids]
    decoded = tokenizer.decode(ids)
    print(f"{given:18} tokenizers {decoded!r:20} in a stream {streamed!s:32} tiktoken {other.decode(others)!r}")
    is_so &= decoded == f"a{BROKEN.get(text, text)}b" and other.decode(others) == given
    is_so &= (None in streamed) == (decoded[-2] == "\ufffd")
sys.exit(0 if is_so else "added tokens are decoded otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/decoded.py"
