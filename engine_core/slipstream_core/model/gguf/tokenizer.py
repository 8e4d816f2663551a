"""Makes a tokenizer.json of the vocabulary in a file's metadata.

A file names how its text is split before merges apply (`tokenizer.ggml.pre`), but does not hold it;
what stands here is what the tokenizers have from which such files are made. A name that is not
here is refused: another split gives other tokens without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from slipstream_core.model.gguf.metadata import Metadata

Json = dict[str, Any]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types
_BYTE_LEVEL, _SENTENCEPIECE, _GEMMA_4 = "gpt2", "llama", "gemma4"  # by ggml's names
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's
# whose special tokens take the spaces behind them away, but for these
_PHI_3, _PHI_3_PLAIN = "phi3", ("<unk>", "<s>", "<|endoftext|>")
_INSTEAD = "give --tokenizer with a folder or hub id that has the model's tokenizer.json"

_WORDS_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS_1 = _WORDS_3.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """The treatment of text by a byte-level tokenizer before merges apply.

    `regex`, of several one behind the other, None for GPT-2's own; `digits` splits each digit off
    before it.
    """

    regex: str | tuple[str, ...] | None = None
    digits: bool = False
    composes: bool = False  # NFC
    whole_words: bool = False  # a word that is a token is not merged from its parts
    adds_bos: bool = False  # where the file does not say


_LLAMA_3 = Split(_WORDS_3, whole_words=True, adds_bos=True)
SPLITS: Mapping[str, Split] = {
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "smaug-bpe": Split(_WORDS_3),
    "dbrx": Split(_WORDS_3),
    "glm4": Split(_WORDS_3),
    "chatglm-bpe": Split(_WORDS_3),
    "qwen2": Split(_WORDS_1, composes=True),
    "deepseek-r1-qwen": Split(_WORDS_1, composes=True),
    "qwen35": Split(_WORDS_WITH_MARKS, composes=True),
    "deepseek-v3": Split(_DEEPSEEK_3),
    "tekken": Split(_TEKKEN, whole_words=True, adds_bos=True),
    "gpt-4o": Split(_GPT_4O),
    "minimax-m2": Split(_GPT_4O),
    "command-r": Split(digits=True, composes=True),
    "smollm": Split(digits=True),
    "refact": Split(digits=True),
    "starcoder": Split(digits=True),
    "gpt-2": Split(),
}
"""By the names in `tokenizer.ggml.pre`."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file, and what it says of them."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    ids: Mapping[str, int]  # of bos, eos, unknown and others that are there
    adds_bos: bool | None
    adds_eos: bool
    has_prefix: bool  # a space in front of a text

    def token(self, name: str) -> str | None:
        """The token that is the file's bos, eos, unknown or padding."""
        return self.tokens[self.ids[name]] if name in self.ids else None


_IDS = (
    "bos",
    "eos",
    "eot",
    "eom",
    "unknown",
    "padding",
    "separator",
    "seperator",  # ggml's spelling
    "cls",
    "mask",
    "prefix",
    "suffix",
    "middle",
    *(f"fim_{each}" for each in ("pre", "suf", "mid", "pad", "rep", "sep")),
)


def read_vocabulary(metadata: Metadata, vocab_size: int) -> Vocabulary:
    """The vocabulary of a file. vocab_size: of the model. Raises GGUFError."""
    ggml = "tokenizer.ggml."
    model = metadata.text(f"{ggml}model")
    if model not in (_BYTE_LEVEL, _SENTENCEPIECE, _GEMMA_4):
        raise metadata.error(
            f"has a tokenizer of the kind {model!r}; served are {_BYTE_LEVEL!r}, "
            f"{_SENTENCEPIECE!r} and {_GEMMA_4!r}; {_INSTEAD}"
        )
    tokens = metadata.texts(f"{ggml}tokens")
    if not tokens or len(tokens) > vocab_size:
        count = len(tokens or ())
        raise metadata.error(f"names {count} tokens, and its model has {vocab_size}")
    types = metadata.numbers(f"{ggml}token_type")
    scores = metadata.numbers(f"{ggml}scores")
    for name, listed in (("token_type", types), ("scores", scores)):
        if listed is not None and len(listed) != len(tokens):
            raise metadata.error(f"has {len(listed)} values in {ggml + name!r} for {len(tokens)}")
    ids: dict[str, int] = {}
    for name in _IDS:
        key = f"{ggml}{name}_token_id"
        if metadata.has(key):
            ids[name] = metadata.integer(key)
            if ids[name] >= len(tokens):
                raise metadata.error(f"has {ids[name]} in {key!r}, and {len(tokens)} tokens")
    flags: dict[str, bool | None] = {}
    for name in ("bos", "eos"):
        key = f"{ggml}add_{name}_token"
        flags[name] = metadata.flag(key) if metadata.has(key) else None
        if flags[name] and name not in ids:
            raise metadata.error(f"adds a token to each text that it does not name ({key!r})")
    metadata.require(f"{ggml}add_sep_token", allowed=False)
    metadata.require(f"{ggml}remove_extra_whitespaces", allowed=False)
    metadata.require(f"{ggml}token_type_count", 1)
    whole = [_NORMAL] * len(tokens) if types is None else [int(each) for each in types]
    return Vocabulary(
        model=model,
        pre=metadata.text(f"{ggml}pre", "default"),
        tokens=tokens,
        types=whole,
        scores=scores,
        merges=metadata.texts(f"{ggml}merges"),
        ids=ids,
        adds_bos=flags["bos"],
        adds_eos=bool(flags["eos"]),
        has_prefix=metadata.flag(f"{ggml}add_space_prefix", default=True),
    )


def tokenizer_json(metadata: Metadata, vocabulary: Vocabulary, architecture: str) -> Json:
    """The tokenizer.json. Raises GGUFError for a vocabulary that is not understood."""
    byte_level = vocabulary.model == _BYTE_LEVEL
    make = _byte_level if byte_level else _sentencepiece
    parts, adds_bos = make(metadata, vocabulary, architecture)
    if len(parts["model"]["vocab"]) != len(vocabulary.tokens):
        [(twice, _)] = Counter(vocabulary.tokens).most_common(1)
        raise metadata.error(f"names the token {twice!r} twice; {_INSTEAD}")
    adds_bos = adds_bos if vocabulary.adds_bos is None else vocabulary.adds_bos
    first = ["bos"] if adds_bos and "bos" in vocabulary.ids else []
    last = ["eos"] if vocabulary.adds_eos else []
    strips = architecture == _PHI_3 and not byte_level
    added = [
        {
            "id": token_id,
            "content": _spelled(token, architecture),
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and kind == _CONTROL and token not in _PHI_3_PLAIN,
            "normalized": False,
            "special": kind in (_CONTROL, _UNKNOWN),
        }
        for token_id, (token, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": _post_processor(vocabulary, first, last, byte_level=byte_level),
        "decoder": parts["decoder"],
        "model": parts["model"],
    }


def _byte_level(metadata: Metadata, vocabulary: Vocabulary, _: str) -> tuple[Json, bool]:
    split = SPLITS.get(vocabulary.pre)
    if split is None:
        raise metadata.error(
            f"splits text as {vocabulary.pre!r} (tokenizer.ggml.pre), which is not known here; "
            f"known are {', '.join(SPLITS)}; {_INSTEAD}"
        )
    if vocabulary.merges is None:
        raise metadata.error(f"lacks 'tokenizer.ggml.merges' in its metadata; {_INSTEAD}")
    merges = [merge.split(" ") for merge in vocabulary.merges]
    if odd := next((merge for merge in merges if len(merge) != 2), None):
        raise metadata.error(f"has a merge of {len(odd)} parts in 'tokenizer.ggml.merges'")
    vocab = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    for pair in merges:
        for part in (*pair, pair[0] + pair[1]):
            if part not in vocab:
                raise metadata.error(f"merges to or from {part!r}, which is no token of it")
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    before: list[Json] = []
    if split.digits:
        before.append({"type": "Digits", "individual_digits": True})
    for regex in (split.regex,) if isinstance(split.regex, str) else split.regex or ():
        pattern = {"Regex": regex}
        before.append(
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        )
    before.append(bytes_ | {"use_regex": split.regex is None})
    parts = {
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": bytes_ | {"use_regex": True},
        "model": _bpe(vocab, merges, whole_words=split.whole_words),
    }
    return parts, split.adds_bos


def _sentencepiece(
    metadata: Metadata, vocabulary: Vocabulary, architecture: str
) -> tuple[Json, bool]:
    tokens = [_spelled(token, architecture) for token in vocabulary.tokens]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = vocabulary.token("unknown")
    if unknown is None:
        kinds = vocabulary.types
        unknown = tokens[kinds.index(_UNKNOWN)] if _UNKNOWN in kinds else None
    if vocabulary.merges is not None:
        merges = [merge.split(" ") for merge in vocabulary.merges]
        if odd := next((merge for merge in merges if len(merge) != 2), None):
            raise metadata.error(f"has a merge of {len(odd)} parts in 'tokenizer.ggml.merges'")
    else:
        merges = _implied_merges(metadata, vocabulary, tokens, vocab, architecture)
    fallback = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not fallback and _BYTE in vocabulary.types:
        raise metadata.error(f"has tokens of some single bytes and not of all; {_INSTEAD}")
    normalizers: list[Json] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.has_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges, unknown=unknown, fuse=True, fallback=fallback),
    }
    return parts, True


def _implied_merges(
    metadata: Metadata,
    vocabulary: Vocabulary,
    tokens: list[str],
    vocab: Mapping[str, int],
    architecture: str,
) -> list[list[str]]:
    """The merges of a sentencepiece vocabulary: each pair of tokens that makes a token, those of
    the best scores first. Gemma's scores are not the order in which it merges; its ids are.
    """
    is_gemma = architecture.startswith("gemma")
    if vocabulary.scores is None:
        raise metadata.error(f"lacks 'tokenizer.ggml.scores' in its metadata; {_INSTEAD}")
    merged = (_NORMAL, _USER_DEFINED) if is_gemma else (_NORMAL,)
    usable = {token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind in merged}
    found: list[tuple[float, int, int, int, int, str]] = []
    for token in usable:
        token_id = vocab[token]
        score = -float(token_id) if is_gemma else vocabulary.scores[token_id]
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in usable and right in usable:
                found.append((-score, -at, at - len(token), token_id, at, token))
    found.sort()
    return [[token[:at], token[at:]] for *_, at, token in found]


def _spelled(token: str, architecture: str) -> str:
    """A token as its vocabulary has it: converters write Gemma's runs of spaces as plain spaces."""
    if architecture.startswith("gemma") and token and not token.strip(" "):
        return _SPACE * len(token)
    return token


def _bpe(
    vocab: dict[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None = None,
    fuse: bool = False,
    fallback: bool = False,
    whole_words: bool = False,
) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse,
        "byte_fallback": fallback,
        "ignore_merges": whole_words,
        "vocab": vocab,
        "merges": merges,
    }


def _post_processor(
    vocabulary: Vocabulary, first: Iterable[str], last: Iterable[str], *, byte_level: bool
) -> Json | None:
    """Adds the tokens at a text's begin and end."""
    byte_offsets = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    names = {name: vocabulary.ids[name] for name in chain(first, last)}
    if not names:
        return byte_offsets if byte_level else None
    texts = {name: vocabulary.tokens[token_id] for name, token_id in names.items()}
    added = {name: {"SpecialToken": {"id": text, "type_id": 0}} for name, text in texts.items()}
    before, behind = ([added[name] for name in names if name == end] for end in ("bos", "eos"))
    sequence = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    template = {
        "type": "TemplateProcessing",
        "single": [*before, sequence[0], *behind],
        "pair": [*before, sequence[0], *behind, *before, sequence[1], *behind],
        "special_tokens": {
            text: {"id": text, "ids": [names[name]], "tokens": [text]}
            for name, text in texts.items()
        },
    }
    if not byte_level:
        return template
    return {"type": "Sequence", "processors": [byte_offsets, template]}
