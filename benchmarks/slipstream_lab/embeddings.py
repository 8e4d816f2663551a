"""`slipstream bench embeddings`: vectors of texts from a stack, beside sentence-transformers.

A BERT of MiniLM's shape (six layers, 384 wide) has random weights and a vocabulary of made-up
words. A stack of its own serves it on the CPU in float32, and its
client embeds all texts in calls of 512; sentence-transformers encodes the same texts in this
process, in batches of 32, as it does by default. A round measures both, in turn; speeds are tokens
of texts by seconds, from text to vector. Both say the same vectors, or it ends with an error.
`bound` is the speed of the model's products alone, of 2,048 rows each, in this process: no engine
that computes in float32 is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

from slipstream import Client, Stack
from slipstream.cli.options.parser import Parser
from slipstream.errors import BadRequestError
from slipstream_bench.common.measures import Row
from slipstream_bench.common.options import Option, add, fill_in, integer
from slipstream_bench.common.report import add_common, check_common, print_rows
from slipstream_ipc.messages import Fault
from slipstream_lab.common.goals import Goal

_LEAST = 3.0  # times sentence-transformers' speed
_CALL = 512  # inputs
_ROWS = 2048  # of a product
_MEDIAN_LEN, _SPREAD, _MAX_LEN = 48, 0.9, 254  # tokens of a text, without special ones
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_VOCAB_SIZE = 30_522
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}

_OPTIONS = (
    Option("texts", integer(1), "texts of a round; default: 1024, with --quick 32"),
    Option("threads", integer(1), "threads that compute the model"),
)


def add_options(parser: Parser) -> None:
    """The benchmark's options."""
    add(parser.add_argument_group("what is measured"), _OPTIONS)
    add_common(parser, runs=5)
    parser.set_defaults(run=bench_embeddings)


def bench_embeddings(arguments: argparse.Namespace) -> int:
    """Measure and report. Raises BadRequestError where sentence-transformers is not installed."""
    check_common(arguments)
    values = fill_in(arguments, _OPTIONS)
    num_texts = arguments.texts or (32 if arguments.quick else 1024)
    threads = values["threads"] or torch.get_num_threads()
    peer = _sentence_transformer()
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as name:
        folder = save_embedder(Path(name) / "model")
        texts = made_up_texts(num_texts)
        torch.set_num_threads(threads)
        encoder = peer(str(folder), device="cpu")
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": threads}
        with (
            Stack(model=str(folder), spare_core=False, spare_worker=False, **options) as stack,
            Client(stack.address) as client,
        ):
            rows = [_round(client, encoder, texts, at) for at in range(arguments.runs + 1)][1:]
    print_rows(rows, arguments, ("tokens", "slipstream", "peer", "bound", "ratio"))
    print(goal(rows))
    return 0


def goal(rows: Sequence[Row]) -> Goal:
    """Return the goal, and whether the median round met it."""
    ratio = statistics.median(float(str(row["ratio"])) for row in rows)
    return Goal("tokens a second, times sentence-transformers'", ratio, _LEAST)


def made_up_texts(num: int) -> list[str]:
    """Texts of words that are a token each, of lengths as in a search index: most are short."""
    random = np.random.default_rng(0)
    lens = random.lognormal(np.log(_MEDIAN_LEN), _SPREAD, num).round().clip(3, _MAX_LEN)
    words = np.array(_words())
    return [" ".join(random.choice(words, int(length))) for length in lens]


def save_embedder(folder: Path) -> Path:
    """Write the model and its tokenizer as sentence-transformers does; returns the folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("bert", **_SHAPE)
    model: Any = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    vocabulary = {word: at for at, word in enumerate([*_SPECIAL, *_words()])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=_SPECIAL[1]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    special = zip(("pad", "unk", "cls", "sep", "mask"), _SPECIAL, strict=True)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "model_max_length": _MAX_LEN + 2,
            **{f"{name}_token": token for name, token in special},
        },
    )
    kinds = ("Transformer", "Pooling", "Normalize")
    _write(
        folder / "modules.json",
        [
            {
                "idx": at,
                "name": str(at),
                "path": f"{at}_{kind}" if at else "",
                "type": f"sentence_transformers.models.{kind}",
            }
            for at, kind in enumerate(kinds)
        ],
    )
    pooling = {"word_embedding_dimension": _SHAPE["hidden_size"], "pooling_mode_mean_tokens": True}
    _write(folder / "1_Pooling" / "config.json", pooling)
    (folder / "2_Normalize").mkdir()
    return folder


def _write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def _words() -> list[str]:
    """A word for each id behind the special ones; of five letters, none is part of another."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words: list[str] = []
    for at in range(_VOCAB_SIZE - len(_SPECIAL)):
        word, rest = "", at
        for _ in range(5):
            rest, place = divmod(rest, len(letters))
            word += letters[place]
        words.append(word)
    return words


def _sentence_transformer() -> Any:
    try:
        return importlib.import_module("sentence_transformers").SentenceTransformer
    except ImportError as error:
        why = f"{error}; the peer is installed with pip install sentence-transformers"
        raise BadRequestError(Fault("bad_request", why)) from error


def _round(client: Client, encoder: Any, texts: Sequence[str], at: int) -> Row:
    """Measure both, the peer first in every other round."""
    seconds: dict[str, float] = {}
    num_tokens = 0
    vectors: dict[str, Any] = {}
    for name in ("peer", "slipstream") if at % 2 else ("slipstream", "peer"):
        began = time.perf_counter()
        if name == "peer":
            vectors[name] = encoder.encode(list(texts))
        else:
            calls = [client.embed(texts[first : first + _CALL]) for first in _firsts(texts)]
            vectors[name] = np.concatenate([call.vectors for call in calls])
            num_tokens = sum(num for call in calls for num in call.num_prompt_tokens)
        seconds[name] = time.perf_counter() - began
    if not np.allclose(vectors["peer"], vectors["slipstream"], atol=1e-5):
        raise ValueError("sentence-transformers computes other vectors")
    speeds = {name: num_tokens / taken for name, taken in seconds.items()}
    ratio = speeds["slipstream"] / speeds["peer"]
    return {"tokens": num_tokens, **speeds, "bound": _products_a_second(), "ratio": ratio}


def _products_a_second() -> float:
    """Tokens a second of the products of all layers, the median of several."""
    width, inner = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]
    shapes = [(width, width)] * 4 + [(inner, width), (width, inner)]
    pairs = [(torch.randn(_ROWS, inputs), torch.randn(out, inputs)) for out, inputs in shapes]
    taken = []
    with torch.inference_mode():
        for _ in range(5):
            began = time.perf_counter()
            for rows, weight in pairs:
                torch.nn.functional.linear(rows, weight)
            taken.append(time.perf_counter() - began)
    return _ROWS / (statistics.median(taken) * int(_SHAPE["num_hidden_layers"]))


def _firsts(texts: Sequence[str]) -> range:
    return range(0, len(texts), _CALL)
