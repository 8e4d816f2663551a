"""A tokenizer for models with random weights, with a word for each id."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def stand_in_tokenizer(folder: Path, vocab_size: int) -> Path:
    """The folder of a tokenizer with `vocab_size` ids; made once in a folder."""
    path = folder / f"tokenizer-{vocab_size}"
    if not (path / "tokenizer.json").exists():
        path.mkdir(exist_ok=True)
        _save_tokenizer(path, vocab_size)
    return path


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level, with a made-up word for each id: text costs as much as with a real tokenizer."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [c + v for c in "bcdfghjklmnpqrstvwxz" for v in "aeiou"]
    number = 0
    while len(tokens) < vocab_size:
        word, rest = "", len(syllables) + number  # at least two syllables, so all differ
        while rest:
            rest, place = divmod(rest, len(syllables))
            word += syllables[place]
        tokens.append("\u0120" + word)
        number += 1
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.save(str(path / "tokenizer.json"))
