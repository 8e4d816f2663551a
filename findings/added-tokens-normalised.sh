#!/usr/bin/env bash
# Versions:  tokenizers 0.23.3 (Python 3.11 to 3.13).
# Guess:     `add_tokens(["<tool>"])` makes a text one token wherever it stands; `normalized=True`, the default for
#            tokens that are not special, matters for case and accents.
# Behaviour: the token's own text is normalised as well. A normaliser that puts a blank before the text, as Llama 2's,
#            turns it into "▁<tool>": it is found at the beginning and after a blank, which it swallows, but not after
#            a letter or a line's end, where it is spelled out. So a call that begins on a new line is not seen, and the
#            same text is the token or not by what stands before it. With `normalized=False`, or where the blank comes
#            from a pre-tokeniser (Metaspace), the guess holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3
cat >"$folder/added.py" <<'PROGRAM'
import sys

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

TEXTS = ("<tool>", "a <tool>", "a<tool>", "a\n<tool>")
vocabulary = ["<unk>"] + [f"<0x{code:02X}>" for code in range(256)] + list("▁abcdefghijklmnopqrstuvwxyz<>")


def made(blank):
    model = models.BPE({token: at for at, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    if blank == "normaliser":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


seen = {}
for blank in ("normaliser", "metaspace"):
    for is_normalised in (None, False):
        tokenizer = made(blank)
        tokenizer.add_tokens(["<tool>" if is_normalised is None else AddedToken("<tool>", normalized=False)])
        number = tokenizer.token_to_id("<tool>")
        found = seen[blank, is_normalised] = tuple(number in tokenizer.encode(text).ids for text in TEXTS)
        how = "by default" if is_normalised is None else "normalized=False"
        said = (f"{text!r} {each}" for text, each in zip(TEXTS, found, strict=True))
        print(f"blank by {blank}, {how}:", ", ".join(said))
tokenizer = made("normaliser")
tokenizer.add_tokens(["<tool>"])
after = tokenizer.encode("a <tool>").tokens
print("'a <tool>' is", after, "and 'a\\n<tool>' is", tokenizer.encode("a\n<tool>").tokens)
everywhere = (True, True, True, True)
is_so = seen.pop(("normaliser", None)) == (True, True, False, False) and set(seen.values()) == {everywhere}
sys.exit(0 if is_so and len(after) == 3 else "added tokens are found otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/added.py"
