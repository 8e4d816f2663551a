"""Small tokenizers trained in an instant, without files or a hub: `KINDS` has a function for each
kind of decoder that models on the hub have.
"""

# ruff: noqa: S106 - unk_token is no password

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

__all__ = ["KINDS", "LINES", "SPECIAL"]

LINES = [
    "the quick brown fox jumps over the lazy dog, and the dog doesn't mind at all",
    "    def step(self, token_id):\n\treturn self.text[token_id]  # don't, say I",
    "l'été où le garçon naïf a mangé des œufs à Noël, c'était déjà très tôt",
    "größere Übungen für müde Mädchen auf der Straße",
    "привет мир, сегодня хорошая погода и много работы",
    "γειά σου κόσμε, καλημέρα και ευχαριστώ",  # noqa: RUF001 - Greek is meant
    "今天天气很好,我们一起去学校学习中文",
    "こんにちは世界、今日はいい天気ですね",
    "안녕하세요 오늘 날씨가 좋아요",
    "नमस्ते दुनिया, आप कैसे हैं",
    "مرحبا بالعالم كيف حالك اليوم",
    "emoji 😀 🎉 👨‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️ and 123 4567 numbers!?",
] * 4

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """GPT-2 style, with unassigned ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _with_added_tokens(_with_holes(json.loads(tokenizer.to_str()), ["ĠĠĠĠ"]))


def llama_2() -> Tokenizer:
    """Llama 2 style: "▁" for spaces, <0xNN> for unknown characters, the first space stripped."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL, *byte_tokens],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    config = json.loads(tokenizer.to_str())
    config["added_tokens"] = [a for a in config["added_tokens"] if a["content"] in SPECIAL]
    config["pre_tokenizer"] = None
    return _with_added_tokens(_with_holes(config, ["", "▁▁"]))


def gemma() -> Tokenizer:
    """Gemma style: as Llama 2, with nothing stripped."""
    tokenizer = llama_2()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def metaspace_always() -> Tokenizer:
    """T5 style: Unigram, with the first token's space stripped."""
    return _unigram("always", split=True)


def metaspace_first() -> Tokenizer:
    """As T5, with a space prepended to the first word only, and words not split."""
    return _unigram("first", split=False)


def metaspace_never() -> Tokenizer:
    """As T5, with no space prepended or stripped."""
    return _unigram("never", split=True)


def word_piece() -> Tokenizer:
    """BERT style: a space before each token except the first and those that begin with ##."""
    return _word_piece(cleanup=True)


def word_piece_verbatim() -> Tokenizer:
    """As BERT, keeping spaces before punctuation."""
    return _word_piece(cleanup=False)


def word_end() -> Tokenizer:
    """The first GPT's style: </w> ends a word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("a</w>b"), AddedToken("</w>")])
    return _with_added_tokens(tokenizer)


def no_decoder() -> Tokenizer:
    """Words joined with spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return _with_added_tokens(_with_holes(json.loads(tokenizer.to_str()), [""]))


def ctc() -> Tokenizer:
    """Speech recognition style: a token equal to the one before is dropped. Has no table."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.CTC()
    trainer = trainers.WordLevelTrainer(
        special_tokens=[*SPECIAL, "<pad>", "|"], show_progress=False
    )
    tokenizer.train_from_iterator([line.replace(" ", "|") for line in LINES], trainer)
    return _with_added_tokens(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_2": llama_2,
    "gemma": gemma,
    "metaspace_always": metaspace_always,
    "metaspace_first": metaspace_first,
    "metaspace_never": metaspace_never,
    "word_piece": word_piece,
    "word_piece_verbatim": word_piece_verbatim,
    "word_end": word_end,
    "no_decoder": no_decoder,
    "ctc": ctc,
}


def _unigram(prepend_scheme: str, split: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=split)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme, split=split)
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("▁a▁b")])  # a token with two spaces, which may come first
    return _with_added_tokens(tokenizer)


def _word_piece(cleanup: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return _with_added_tokens(_with_holes(json.loads(tokenizer.to_str()), ["", "##"]))


def _with_holes(config: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """The tokenizer of `config` with more tokens at much higher ids: ids between are unassigned.

    "" is a token with empty text, which differs from an unassigned id.
    """
    vocab = config["model"]["vocab"]
    for token in tokens:
        vocab[token] = max(vocab.values()) + 7
    return Tokenizer.from_str(json.dumps(config))


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("中文 added"), AddedToken("é")])
    tokenizer.add_special_tokens([AddedToken("<|späcial 標|>", special=True)])
    return tokenizer
