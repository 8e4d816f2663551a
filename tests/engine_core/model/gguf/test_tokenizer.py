"""Tokenizers from metadata: the ids, texts and templates of those that the files are made from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import gguf
import pytest
import sentencepiece
from tests.helpers.gguf_models import add_tokenizer, make_model, write_gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

from slipstream_core.model.gguf.folder import Overrides, unfold
from slipstream_core.model.gguf.reader import GGUFError
from slipstream_core.model.gguf.tokenizer import SPLITS

CORPUS = [
    Path(__file__).parents[4].joinpath(name).read_text()
    for name in ("README.md", "ARCHITECTURE.md", "PROTOCOL.md")
]
SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<think>")
TEXTS = (
    "",
    " ",
    "Hello world",
    "  two spaces, then\n\n\nlines\t\tand tabs  ",
    "it's WE'LL don't HTTPServer camelCase snake_case",
    "1234567 numbers 3.14 and 10,000",
    "caf\u00e9 cafe\u0301 \u00c5 A\u030a",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f9d1\u200d\U0001f680 \u0939\u093f\u0928\u094d",
    "a<|user|>b <think> c</think><|end|>",
    "\r\n\x00\x7f //// /* code */ x = {'a': [1, 2]};",
)


@cache
def byte_level() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges of a small vocabulary, whose words have all shapes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\p{N}+|[^\s\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, *TEXTS], trainer)
    told = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(told["vocab"], key=told["vocab"].get)
    return tuple(tokens), tuple(" ".join(merge) for merge in told["merges"])


def unfolded(
    folder: Path,
    write: Callable[[gguf.GGUFWriter], None],
    vocab_size: int,
    family: str = "llama",
    overrides: Overrides | None = None,
) -> Path:
    model = make_model(family, vocab_size=vocab_size, num_hidden_layers=1)
    file = write_gguf(folder / "x.gguf", family, model, extra=write)
    return unfold(file, overrides, cache=folder / "cache")


def of_pre(folder: Path, pre: str, **flags: bool) -> Any:
    tokens, merges = byte_level()
    whole = [*tokens, *SPECIAL]
    types = [1] * len(tokens) + [3, 3, 3, 4]

    def write(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, "gpt2", pre, whole, types, merges=merges)
        writer.add_bos_token_id(len(tokens))
        writer.add_eos_token_id(len(tokens) + 1)
        writer.add_eot_token_id(len(tokens) + 2)
        for name, flag in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", flag)

    return AutoTokenizer.from_pretrained(unfolded(folder, write, len(whole)))


@pytest.mark.parametrize(
    ("pre", "make"),
    [
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("gpt-2", GPT2Tokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_ids_are_those_of_the_models_own_tokenizer(
    pre: str, make: Callable[..., Any], tmp_path: Path
) -> None:
    ours = of_pre(tmp_path, pre)
    tokens, merges = byte_level()
    vocab = {token: at for at, token in enumerate((*tokens, *SPECIAL))}
    theirs = make(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    for text in TEXTS[:-2]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


# those that transformers knows by that name, but for whether it composes characters
@pytest.mark.parametrize("pre", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_text_is_split_as_transformers_splits_it(pre: str, tmp_path: Path) -> None:
    ours = of_pre(tmp_path, pre)
    tokens, merges = byte_level()
    told: dict[str, Any] = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": pre,
        "tokens": [*tokens, *SPECIAL],
        "token_type": [*([1] * len(tokens)), 3, 3, 3, 4],
        "merges": merges,
    }
    theirs, _ = convert_gguf_tokenizer("llama", told)
    for text in TEXTS:
        composed = normalize("NFC", text) if SPLITS[pre].composes else text
        ids = theirs.encode(composed, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False).input_ids == ids, text
        assert ours.decode(ids) == composed


def test_digits_are_split_one_by_one(tmp_path: Path) -> None:
    ours = of_pre(tmp_path, "smollm")
    assert ours.tokenize("a12 345") == ["a", "1", "2", "\u0120", "3", "4", "5"]


def test_text_is_split_by_one_pattern_behind_the_other(tmp_path: Path) -> None:
    ours = of_pre(tmp_path, "deepseek-v3").backend_tokenizer.pre_tokenizer
    text = "ab12345 x.y(z \u4f60\u597dok\n\n 3"
    pieces = ["ab", "123", "45", " x", ".y", "(z", " ", "\u4f60\u597d", "ok", "\n\n", " ", "3"]
    offsets = [offset for _, offset in ours.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in offsets] == pieces


@pytest.mark.parametrize(
    ("pre", "flags", "starts", "ends"),
    [
        ("llama-bpe", {}, True, False),
        ("tekken", {}, True, False),
        ("qwen2", {}, False, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(
    pre: str, flags: dict[str, bool], starts: bool, ends: bool, tmp_path: Path
) -> None:
    ours = of_pre(tmp_path, pre, **flags)
    ids = ours("a").input_ids
    assert (ids[0] == ours.bos_token_id, ids[-1] == ours.eos_token_id) == (starts, ends)
    assert ours("a", add_special_tokens=False).input_ids == ids[starts : len(ids) - ends]
    assert (ours.bos_token, ours.eos_token) == ("<|begin|>", "<|end|>")


def test_special_tokens_are_whole_and_the_ends_are_all_named(tmp_path: Path) -> None:
    ours = of_pre(tmp_path, "qwen2")
    ids = ours("a<|user|>b<think>").input_ids
    assert ours.convert_ids_to_tokens(ids) == ["a", "<|user|>", "b", "<think>"]
    assert ours.decode(ids, skip_special_tokens=True) == "ab<think>"
    [folder] = (tmp_path / "cache").iterdir()
    told = json.loads((folder / "generation_config.json").read_bytes())
    assert told["eos_token_id"] == [ours.eos_token_id, ours.convert_tokens_to_ids("<|user|>")]


def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(CORPUS).split("\n")),
        model_writer=made,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        bos_id=1,
        eos_id=2,
        unk_id=0,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def write_sentencepiece(
    writer: gguf.GGUFWriter, model: sentencepiece.SentencePieceProcessor, **flags: bool
) -> None:
    def kind(at: int) -> int:
        if model.IsUnknown(at):
            return 2
        if model.IsControl(at):
            return 3
        return 6 if model.IsByte(at) else 1

    ids = range(model.vocab_size())
    add_tokenizer(
        writer,
        "llama",
        "default",
        [model.IdToPiece(at) for at in ids],
        [kind(at) for at in ids],
        scores=[model.GetScore(at) for at in ids],
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, flag in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)


def test_sentencepiece_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    model = sentencepiece_model()
    folder = unfolded(
        tmp_path, lambda writer: write_sentencepiece(writer, model), model.vocab_size()
    )
    ours = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        if any(each in text for each in SPECIAL):
            continue
        expected = model.EncodeAsIds(text)
        assert ours(text, add_special_tokens=False).input_ids == expected, text
        assert ours(text).input_ids == [1, *expected]
        assert ours.decode(expected) == model.DecodeIds(expected)


@pytest.mark.parametrize("kind", ["llama", "gemma4"])
def test_gemma_gives_the_ids_of_gemma(kind: str, tmp_path: Path) -> None:
    """Gemma 4's files have the merges that those of the others imply."""
    model = sentencepiece_model()
    merges: list[list[str]] = []

    def write(writer: gguf.GGUFWriter) -> None:
        write_sentencepiece(writer, model, add_space_prefix=False)
        if merges:
            writer.add_tokenizer_model(kind)
            writer.add_token_merges([" ".join(merge) for merge in merges])

    folder = unfolded(tmp_path, write, model.vocab_size(), "gemma2")
    merges = json.loads((folder / "tokenizer.json").read_bytes())["model"]["merges"]
    if kind == "gemma4":
        folder = unfolded(tmp_path, write, model.vocab_size(), "gemma2")
    ours = AutoTokenizer.from_pretrained(folder)
    vocab = {model.IdToPiece(at): at for at in range(model.vocab_size())}
    theirs = GemmaTokenizer(vocab=vocab, merges=[tuple(merge) for merge in merges])
    for text in TEXTS:
        if not any(each in text for each in SPECIAL):
            ids = ours(text, add_special_tokens=False).input_ids
            assert ids == theirs(text, add_special_tokens=False).input_ids, text
            assert ours.decode(ids) == text


def test_templates_are_those_of_the_file(tmp_path: Path) -> None:
    tokens, merges = byte_level()

    def write(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, "gpt2", "qwen2", tokens, [1] * len(tokens), merges=merges)
        writer.add_chat_template(
            [
                {"name": "default", "template": "{{ messages[0].content }}!"},
                {"name": "tool_use", "template": "tools: {{ messages[0].content }}"},
            ]
        )

    ours = AutoTokenizer.from_pretrained(unfolded(tmp_path, write, len(tokens)))
    turn = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(turn, tokenize=False) == "hi!"
    assert ours.apply_chat_template(turn, chat_template="tool_use", tokenize=False) == "tools: hi"


def refusal(folder: Path, write: Callable[[gguf.GGUFWriter], None], vocab_size: int) -> str:
    with pytest.raises(GGUFError) as refused:
        unfolded(folder, write, vocab_size)
    return str(refused.value)


def small(writer: gguf.GGUFWriter, **changes: Any) -> None:
    settings: dict[str, Any] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ["a", "b", "ab"],
        "types": [1, 1, 1],
        "merges": ["a b"],
    }
    add_tokenizer(writer, **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "unheard-of"}, "splits text as 'unheard-of' (tokenizer.ggml.pre)"),
        ({"pre": "default"}, "splits text as 'default'"),
        ({"model": "bert"}, "a tokenizer of the kind 'bert'"),
        ({"model": "rwkv"}, "a tokenizer of the kind 'rwkv'"),
        ({"tokens": ["a", "b", "a"]}, "merges to or from 'ab'"),
        ({"tokens": ["ab", "a", "b", "a"], "types": [1] * 4}, "names the token 'a' twice"),
        ({"types": [1]}, "has 1 values in 'tokenizer.ggml.token_type' for 3"),
        ({"merges": ["a b c"]}, "has a merge of 3 parts"),
        ({"merges": None}, "lacks 'tokenizer.ggml.merges'"),
        ({"tokens": list("abcdefgh"), "types": [1] * 8}, "names 8 tokens, and its model has 4"),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, lambda writer: small(writer, **changes), 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.eos_token_id", 99),
        ("tokenizer.ggml.remove_extra_whitespaces", True),
        ("tokenizer.ggml.add_sep_token", True),
        ("tokenizer.ggml.unheard_of", 1),
        ("tokenizer.ggml.add_bos_token", True),
        ("llama.unheard_of", 1),
        ("unheard.of", 1),
        ("llama.expert_count", 8),
        ("llama.rope.dimension_count", 4),
        ("general.sampling.xtc_threshold", 1),
    ],
)
def test_a_key_that_is_not_understood_is_refused_by_name(
    key: str, value: int, tmp_path: Path
) -> None:
    def write(writer: gguf.GGUFWriter) -> None:
        small(writer)
        for shard in writer.kv_data:
            shard.pop(key, None)
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(key, value)

    assert repr(key) in refusal(tmp_path, write, 4)


def test_another_tokenizer_may_be_given(tmp_path: Path) -> None:
    other = of_pre(tmp_path, "qwen2")
    other.save_pretrained(tmp_path / "given")
    tokens, _ = byte_level()
    (tmp_path / "y").mkdir()
    folder = unfolded(
        tmp_path / "y",
        lambda writer: small(writer, pre="unheard-of"),
        len(tokens) + 4,
        overrides=Overrides(tokenizer=tmp_path / "given"),
    )
    assert AutoTokenizer.from_pretrained(folder)("Hello").input_ids == other("Hello").input_ids
