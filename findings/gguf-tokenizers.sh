#!/usr/bin/env bash
# Versions:  transformers 5.23.0, tokenizers 0.23.3, sentencepiece 0.2.3, gguf 0.19.0 (Python 3.11 to 3.13).
# Guess:     `AutoTokenizer.from_pretrained(folder, gguf_file=...)` gives the ids of the tokenizer that the file was
#            made from: sentencepiece's for a vocabulary of kind "llama", Qwen2Tokenizer's for a split "qwen2", those of
#            Llama 3's tokenizer.json (`ignore_merges`) for "llama-bpe"; and a name of a split that it does not know is
#            refused, or warned of.
# Behaviour: none of the four. A text that begins with a space gets a prefix less than sentencepiece gives it; "e" with
#            a combining accent is not composed, as Qwen2Tokenizer does; a word that is a token, but that no merges make,
#            falls apart; and an unknown split is GPT-2's, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3 \
  sentencepiece==0.2.3 gguf==0.19.0 numpy torch==2.13.0
cat >"$folder/compare.py" <<'PROGRAM'
import io
import logging
import sys
import warnings

import gguf
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer

folder = sys.argv[1]
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)


def from_file(kind, split, tokens, types, **more):
    """The tokenizer that transformers makes of a file, which is written first."""
    writer = gguf.GGUFWriter(f"{folder}/{split}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_token_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = AutoTokenizer.from_pretrained(folder, gguf_file=f"{split}.gguf")
    said.extend(str(each.message) for each in warned if split in str(each.message))
    return made


def shown(what, ours, theirs):
    print(f"{what}: from the file {ours}, its own {theirs}")
    return ours != theirs


model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["hello world  how are you", "  two spaces begin this line", "a b c d e f"] * 20),
    model_writer=model, model_type="bpe", vocab_size=300, byte_fallback=True, hard_vocab_limit=False,
    normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
)
own = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
ids = range(own.vocab_size())
kinds = [2 if own.IsUnknown(at) else 3 if own.IsControl(at) else 6 if own.IsByte(at) else 1 for at in ids]
made = from_file("llama", "default", [own.IdToPiece(at) for at in ids], kinds, scores=[own.GetScore(at) for at in ids])
text = " hello"
spaces = shown("a leading space", made.encode(text, add_special_tokens=False), own.EncodeAsIds(text))

bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
merges = ["a b", "\u00c3 \u00a9"]
tokens = [*bytes_, "ab", "\u00c3\u00a9", "xyz"]
types = [1] * len(tokens)
vocab = {token: at for at, token in enumerate(tokens)}
pairs = [tuple(each.split(" ")) for each in merges]
text = "e\u0301"
theirs = Qwen2Tokenizer(vocab=vocab, merges=pairs).encode(text, add_special_tokens=False)
made = from_file("gpt2", "qwen2", tokens, types, merges=merges)
composed = shown("a combining accent", made.encode(text, add_special_tokens=False), theirs)

llama = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
llama.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made = from_file("gpt2", "llama-bpe", tokens, types, merges=merges)
whole = shown("a whole word", made.encode("xyz", add_special_tokens=False), llama.encode("xyz").ids)

said.clear()
made = from_file("gpt2", "no-such-split", tokens, types, merges=merges)
text = "ab 1234 don't ab\n\n ab"
gpt2 = GPT2Tokenizer(vocab=vocab, merges=pairs).encode(text)
is_gpt2 = made.encode(text, add_special_tokens=False) == gpt2
print(f"an unknown split: as GPT-2's {is_gpt2}, said of it {[each for each in said if 'no-such-split' in each]}")
silent = is_gpt2 and not any("no-such-split" in each for each in said)
sys.exit(0 if spaces and composed and whole and silent else "tokenizers of GGUF files are read otherwise now")
PROGRAM
"$folder/venv/bin/python" "$folder/compare.py" "$folder"
