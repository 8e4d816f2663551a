"""A model's tokenizer.json decides its ids and text, whatever class transformers builds from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from slipstream_worker.tokenizer.process import TokenizerConfig, load_tokenizer

SPECIAL = ("<unk>", "<s>", "</s>")
TEXTS = ("a b", " a", "</s>a", "a <s> b", "12 12", "it's\n\n12", "  ", "", "é", "<tool>a")


def blank_first() -> Tokenizer:
    """A blank before the text by the normaliser, as in Llama 2's file."""
    ids = {token: at for at, token in enumerate([*SPECIAL, *byte_names(), *"▁ab12its'", "▁a"])}
    model = models.BPE(ids, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return made


def byte_names() -> list[str]:
    return [f"<0x{code:02X}>" for code in range(256)]


def of_bytes(*before: pre_tokenizers.PreTokenizer, use_regex: bool = True) -> Tokenizer:
    """Tokens of bytes, with steps before those that tell words apart."""
    merges = [("1", "2"), ("Ġ", "1"), ("Ġ", "12"), ("Ġ", "a")]
    names = [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(each) for each in merges)]
    ids = {token: at for at, token in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(ids, [each for each in merges if "".join(each) in ids]))
    last = ByteLevel(add_prefix_space=False, use_regex=use_regex)
    made.pre_tokenizer = pre_tokenizers.Sequence([*before, last])
    made.decoder = decoders.ByteLevel()
    return made


def digits() -> Tokenizer:
    return of_bytes(pre_tokenizers.Digits(individual_digits=True))


def split() -> Tokenizer:
    return of_bytes(pre_tokenizers.Split(Regex(r"\s|\d+"), "isolated"), use_regex=False)


CASES = {
    "Llama 2's normaliser": ("LlamaTokenizer", "llama", blank_first),
    "bytes under Llama's class": ("LlamaTokenizerFast", "llama", split),
    "single digits under GPT-2's class": ("GPT2Tokenizer", "starcoder2", digits),
    "whole numbers under Qwen2's class": ("Qwen2Tokenizer", "qwen2", of_bytes),
    "Gemma's class": ("GemmaTokenizerFast", "gemma", blank_first),
    "no class of its own": ("PreTrainedTokenizerFast", "llama", digits),
}


@pytest.fixture(scope="module", autouse=True)
def libraries(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load a tokenizer once: libraries set variables as they are imported."""
    loaded(
        folder_of(tmp_path_factory.mktemp("first"), *CASES["Llama 2's normaliser"][:2], digits())
    )


def folder_of(path: Path, name: str, kind: str, made: Tokenizer, **options: object) -> str:
    made.add_special_tokens(list(SPECIAL))
    made.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    tokens = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    settings = {"tokenizer_class": name, **tokens, **options}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def loaded(folder: str) -> object:
    return load_tokenizer(TokenizerConfig(tokenizer=folder, address="", cache_dir=""))


@pytest.mark.parametrize("case", CASES)
def test_ids_and_text_are_those_of_the_file(case: str, tmp_path: Path) -> None:
    name, kind, make = CASES[case]
    tokenizer = loaded(folder_of(tmp_path, name, kind, make()))
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = file.encode(text, add_special_tokens=False).ids
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text  # type: ignore[operator]
        decoded = tokenizer.backend_tokenizer.decode(ids)  # type: ignore[attr-defined]
        assert decoded == file.decode(ids), text


def test_tokens_and_templates_of_the_configuration_stay(tmp_path: Path) -> None:
    tool = {"content": "<tool>", "special": False, "normalized": False}
    tool |= {"lstrip": False, "rstrip": False, "single_word": False}
    made = digits()
    number = made.get_vocab_size()
    added = {"added_tokens_decoder": {str(number): tool}, "add_bos_token": True}
    tokenizer = loaded(folder_of(tmp_path, "GPT2Tokenizer", "starcoder2", made, **added))
    first, second = made.token_to_id("1"), made.token_to_id("2")
    ids = tokenizer("<tool>12")["input_ids"]  # type: ignore[operator]
    assert ids[-3:] == [number, first, second]
    assert ids[:-3] in ([], [made.token_to_id("<s>")])
