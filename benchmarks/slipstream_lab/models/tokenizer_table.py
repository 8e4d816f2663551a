"""Which tokenizers stream exactly, and how fast: a row for each kind of decoder.

    python -m slipstream_lab.models.tokenizer_table [--markdown] [--json FILE] [FILE ...]

Every kind is a small tokenizer trained from built-in text; files add rows. Random prompts and
outputs (any ids, broken bytes, special tokens skipped or not) are streamed and compared with the
tokenizer's own decode. If the decoder compiles to a table, the table is checked; otherwise the
window, to which the worker falls back.

Speeds are for tokens given one by one, on the tokenizer's own encoding of the built-in text, the
best of several rounds, in microseconds per token: by the table, by the window, and by `tokenizers`'
DecodeStream.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from slipstream_bench.common.report import columns_of, markdown_of
from slipstream_lab.models.tokenizers_in_small import KINDS, LINES
from slipstream_worker.detokenizer.compiler import UnsupportedDecoder, compile_table
from slipstream_worker.detokenizer.factory import (
    DetokenizerFactory,
    TableDetokenizerFactory,
    WindowDetokenizerFactory,
)
from slipstream_worker.detokenizer.reference import DecodeReference, decoder_steps
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.verify import Trial, mismatch_of, random_trials

NUM_TRIALS = 500  # per kind of ids, with special tokens skipped and shown
SEED = 7  # differs from the self-test's
NUM_STREAMS = 32
NUM_ROUNDS = 7


@dataclass(frozen=True)
class TokenizerRow:
    """The result of one tokenizer. Times in microseconds per token."""

    kind: str
    decoder: str
    vocab_size: int
    compiled: str  # "yes", or the reason why not
    num_sequences: int
    num_mismatches: int
    table_us: float | None
    window_us: float
    decode_stream_us: float


HEADINGS = [
    "kind",
    "decoder",
    "vocabulary",
    "compiled",
    "sequences",
    "mismatches",
    "table µs",
    "window µs",
    "DecodeStream µs",
]
assert len(HEADINGS) == len(fields(TokenizerRow))


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description="which tokenizers stream exactly, and how fast")
    parser.add_argument("files", nargs="*", type=Path, help="tokenizer.json files to add")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    arguments = parser.parse_args()
    rows = [measure(kind, make()) for kind, make in KINDS.items()]
    rows += [measure(path.stem, Tokenizer.from_file(str(path))) for path in arguments.files]
    shown = [HEADINGS, *map(cells, rows)]
    lines = markdown_of(shown) if arguments.markdown else columns_of(shown)
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if any(row.num_mismatches for row in rows if row.compiled == "yes"):
        sys.exit("a compiled table is not exact")


def measure(kind: str, tokenizer: Tokenizer) -> TokenizerRow:
    """The row of one tokenizer."""
    window = WindowDetokenizerFactory(tokenizer.to_str().encode())
    used: DetokenizerFactory = window
    table_us = None
    trials: Iterable[Trial]
    try:
        table = compile_table(tokenizer)
    except UnsupportedDecoder as why_not:
        compiled = str(why_not)
        trials = plain_trials(tokenizer)
    else:
        compiled = "yes"
        used = TableDetokenizerFactory(table)
        trials = random_trials(table, NUM_TRIALS, SEED)
        table_us = fastest(lambda ids: stream_all(used, ids), tokenizer)
    reference = DecodeReference(tokenizer)
    mismatches = [mismatch_of(reference, used, trial) for trial in trials]
    return TokenizerRow(
        kind,
        " + ".join(step["type"] for step in decoder_steps(tokenizer)) or "none",
        tokenizer.get_vocab_size(),
        compiled,
        len(mismatches),
        sum(mismatch is not None for mismatch in mismatches),
        table_us,
        fastest(lambda ids: stream_all(window, ids), tokenizer),
        fastest(lambda ids: decode_stream_all(tokenizer, ids), tokenizer),
    )


def plain_trials(tokenizer: Tokenizer) -> Iterable[Trial]:
    """Random ids, for a tokenizer without a table."""
    unknown = TokenTable("text", (None,) * tokenizer.get_vocab_size(), special=())
    return random_trials(unknown, NUM_TRIALS, SEED)


def fastest(stream: Callable[[list[list[int]]], None], tokenizer: Tokenizer) -> float:
    """Microseconds per token that `stream` takes for several streams of text, in the best round."""
    ids = tokenizer.encode("\n".join(LINES), add_special_tokens=False).ids
    rng = random.Random(SEED)  # noqa: S311 - reproducible, no secret
    streams = [ids[(cut := rng.randrange(len(ids))) :] + ids[:cut] for _ in range(NUM_STREAMS)]
    best_s = float("inf")
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        stream(streams)
        best_s = min(best_s, time.perf_counter() - start)
    return best_s / (len(ids) * NUM_STREAMS) * 1e6


def stream_all(factory: DetokenizerFactory, streams: list[list[int]]) -> None:
    """Stream with the product's detokenizer; each stream's first token is its prompt."""
    for ids in streams:
        step = factory.create(ids[:1], skip_special_tokens=True).step
        for token_id in ids:
            step(token_id)


def decode_stream_all(tokenizer: Tokenizer, streams: list[list[int]]) -> None:
    """Stream with the tokenizer's own DecodeStream."""
    for ids in streams:
        step = DecodeStream(skip_special_tokens=True).step
        for token_id in ids:
            step(tokenizer, token_id)


def cells(row: TokenizerRow) -> list[str]:
    """The row's cells as text."""
    return [
        "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        for value in asdict(row).values()
    ]


if __name__ == "__main__":
    main()
