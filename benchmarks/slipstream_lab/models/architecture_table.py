"""Which architectures are served, which are refused.

    python -m slipstream_lab.models.architecture_table

Each of `tiny_models` is built, loaded and run greedily in float32: each prompt alone, all of them
together in chunks, and all of them in a cache so small that some are preempted; hybrid models also
twice with the prefix cache, which keeps their states. Every output token is compared with
transformers' own `generate`. Exits with 1 if an architecture is not exact, or is served although it
should be refused.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers.utils import logging

from slipstream_bench.common.report import columns_of, markdown_of
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model
from slipstream_lab.models.tiny_models import (
    ARCHITECTURES,
    CACHED,
    FURTHER,
    HYBRIDS,
    VARIANTS,
    Architecture,
    generate,
    num_equal,
    save,
    serve,
)


@dataclass(frozen=True, slots=True)
class ArchitectureRow:
    """The result of one architecture."""

    architecture: str
    num_exact: int = 0  # output tokens that agree with generate
    num_tokens: int = 0  # output tokens, over all variants
    refused: str = ""  # the reason
    as_listed: bool = True  # exact, or refused for the listed reason


def measure(architecture: Architecture) -> ArchitectureRow:
    """Build, load, serve and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(architecture, folder)
        try:
            model = load_model(name, device="cpu", dtype="float32")
        except ModelLoadError as error:
            why = str(error).removeprefix(f"cannot load the model {name!r}: ").split("; served")[0]
            listed = architecture.refused is not None and architecture.refused in why
            return ArchitectureRow(architecture.name, refused=why, as_listed=listed)
        expected = generate(folder)
        variants = (*VARIANTS, CACHED) if model.states else VARIANTS
        outputs = [served.outputs for served in serve(model, *variants)]
    num_exact = sum(num_equal(each, expected) for each in outputs)
    num_tokens = sum(map(len, expected)) * len(outputs)
    as_listed = architecture.refused is None and num_exact == num_tokens
    return ArchitectureRow(architecture.name, num_exact, num_tokens, as_listed=as_listed)


def table(rows: list[ArchitectureRow], *, markdown: bool) -> str:
    """The rows under their headings, in columns or as Markdown."""
    cells = [("architecture", "exact", "refused because")]
    for row in rows:
        exact = "" if row.refused else f"{row.num_exact} of {row.num_tokens} tokens"
        cells.append((row.architecture, exact, row.refused))
    return "\n".join(markdown_of(cells) if markdown else columns_of(cells))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", help="keep the rows here")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--only", metavar="TEXT", default="", help="those whose name has this")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are too small for more
    every = ARCHITECTURES + HYBRIDS + FURTHER
    chosen = [each for each in every if options.only.lower() in each.name.lower()]
    if not chosen:
        parser.error(f"--only: got {options.only!r}, allowed: a part of an architecture's name")
    rows = [measure(each) for each in tqdm(chosen, disable=None, leave=False)]
    exact = [row for row in rows if not row.refused]
    sys.stdout.write(
        f"{table(rows, markdown=options.markdown)}\n\n"
        f"{sum(row.as_listed for row in exact)} of {len(exact)} exact, "
        f"{len(rows) - len(exact)} refused; float32, torch {torch.__version__}, "
        f"transformers {transformers.__version__}\n"
    )
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if wrong := [row.architecture for row in rows if not row.as_listed]:
        sys.stderr.write(f"not as listed: {', '.join(wrong)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
