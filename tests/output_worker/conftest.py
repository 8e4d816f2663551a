"""Small tokenizers of each kind, trained in a blink; no files and no hub needed."""

from __future__ import annotations

import json

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

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


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("中文 added"), AddedToken("é")])
    tokenizer.add_special_tokens([AddedToken("<|späcial 標|>", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """GPT-2 style, with ids that no token has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    config = json.loads(tokenizer.to_str())
    vocab = config["model"]["vocab"]
    vocab["ĠĠĠĠ"] = len(vocab) + 7
    return _with_added_tokens(Tokenizer.from_str(json.dumps(config)))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """Llama 2 style: "▁" for blanks, <0xNN> for characters that it has not, the first blank cut."""
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
    return _with_added_tokens(Tokenizer.from_str(json.dumps(config)))


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """T5 style: Unigram whose first token has its blank cut."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return _with_added_tokens(tokenizer)


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """BERT style: a blank before each token but the first and those that begin with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return _with_added_tokens(tokenizer)
