"""Which of transformers' model types would be served, by their default configurations.

    python -m slipstream_lab.models.type_sweep [--only TEXT] [--markdown] [--json FILE]
                                               [--page FILE]

Each type that has a causal or a multimodal class is built from its default configuration without
weights, and goes through the checks that a checkpoint goes through before its weights are read. For
those that pass, weights remain to be tried: that tokens do not influence each other but through
attention, and that states can be continued. Whether outputs are exact is what `architecture_table`
measures. Each type has a process of its own. docs/models.md is the page of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import transformers
from tqdm import tqdm

from slipstream_bench.common.report import columns_of, markdown_of
from slipstream_core.load_error import ModelLoadError, brief
from slipstream_core.model import loader
from slipstream_lab.models.tiny_models import ARCHITECTURES, FURTHER, HYBRIDS, WITHIN_LIMITS


@dataclass(frozen=True, slots=True)
class TypeRow:
    """The result of one type."""

    model_type: str
    classes: str  # causal, multimodal, or both
    refused: str  # the reason; nothing if it passes


class _WouldReadWeights(Exception):  # noqa: N818  (no error)
    pass


def model_types() -> dict[str, str]:
    """The types with a class that writes text, and which classes these are."""
    causal = set(transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    multimodal = set(transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    multimodal |= set(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    found = {}
    for model_type, config_class in sorted(transformers.CONFIG_MAPPING.items()):
        classes = [
            name
            for name, mapped in (("causal", causal), ("multimodal", multimodal))
            if config_class in mapped
        ]
        if classes:
            found[model_type] = ", ".join(classes)
    return found


def refusal_of(model_type: str) -> str:
    """Why the type is refused, in our words; nothing if its weights would be read."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            transformers.CONFIG_MAPPING[model_type]().save_pretrained(folder)
        except Exception as error:
            return f"its default configuration is not valid ({brief(error)})"
        stop = mock.patch.object(loader, "refuse_weights", side_effect=_WouldReadWeights)
        try:
            with stop:
                loader.load_model(folder, device="cpu", dtype="float32")
        except _WouldReadWeights:
            return ""
        except ModelLoadError as error:
            said = str(error).removeprefix(f"cannot load the model {folder!r}: ")
            return said.split("; supported are")[0].replace(folder, "FOLDER")
    raise AssertionError("a model without weights was loaded")


def examine(model_type: str, classes: str) -> TypeRow:
    """Try a type in a process of its own. An error that is not ours is shown as one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as out:
            try:
                out.write(refusal_of(model_type))
            except BaseException as error:  # shown in the table
                out.write(f"NOT IN OUR WORDS: {type(error).__name__}: {error}")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        refused = answer.read()
    _, status = os.waitpid(pid, 0)
    if status:
        refused = f"NOT IN OUR WORDS: its process ended with {status}"
    return TypeRow(model_type, classes, " ".join(refused.split()))


def kinds_of(rows: list[TypeRow]) -> Counter[str]:
    """How many types are refused for each reason, names and numbers left out."""
    reasons = (re.sub(r"\w*[A-Z]\w*|\d+|'[^']*'", "…", row.refused) for row in rows if row.refused)
    return Counter(reasons)


def exact_names() -> dict[str, list[str]]:
    """The names of the table of exactness that are served, by type; a tower's under its own."""
    found: dict[str, list[str]] = {}
    for each in (*ARCHITECTURES, *HYBRIDS, *WITHIN_LIMITS, *FURTHER):
        if each.refused is None:
            found.setdefault(each.config().model_type, []).append(each.name)
    return found


def page_of(rows: list[TypeRow], version: str) -> str:
    """The page of all types, in Markdown."""
    exact = {name: "; ".join(names) for name, names in exact_names().items()}
    passed = [row for row in rows if not row.refused]
    served = [(row.model_type, row.classes, exact.get(row.model_type, "")) for row in passed]
    refused = [
        (row.model_type, row.refused.replace("|", "\\|"), exact.get(row.model_type, ""))
        for row in rows
        if row.refused
    ]
    made = (
        "Made by `python -m slipstream_lab.models.type_sweep --page docs/models.md`, transformers "
        f"{version}. {len(passed)} of {len(rows)} types that have a class which writes text pass "
        "by their default configurations, without weights. What decides is a checkpoint's own "
        "configuration, and a trial with its weights. What *exact* means is in "
        "[exactness.md](exactness.md)."
    )
    others = (
        "By their default configurations. Where the last column names a variant, one with other "
        "options is served, and exact."
    )
    lines = [
        *("# Models by type", "", made, "", "## Served", ""),
        *markdown_of([("type", "classes", "exact, by the table of exactness"), *served]),
        *("", "## Refused", "", others, ""),
        *markdown_of([("type", "reason", "exact all the same"), *refused]),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table; exits with 1 if a type fails otherwise than by a reason of ours."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", metavar="FILE", help="keep the rows here")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--page", metavar="FILE", help="write the page of all types here")
    parser.add_argument("--only", metavar="TEXT", default="", help="types whose name has this")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # a fork has no others
    chosen = {name: found for name, found in model_types().items() if options.only in name}
    if not chosen:
        parser.error(f"--only: got {options.only!r}, allowed: a part of a type's name")
    rows = [examine(*each) for each in tqdm(chosen.items(), disable=None, leave=False)]
    cells = [
        ("type", "classes", "refused because"),
        *((r.model_type, r.classes, r.refused) for r in rows),
    ]
    lines = markdown_of(cells) if options.markdown else columns_of(cells)
    num_passed = sum(not row.refused for row in rows)
    sys.stdout.write("\n".join(lines) + "\n\n")
    for reason, num in kinds_of(rows).most_common():
        sys.stdout.write(f"{num:4d}  {reason}\n")
    sys.stdout.write(
        f"\n{num_passed} of {len(rows)} types pass, transformers {transformers.__version__}\n"
    )
    if options.page:
        Path(options.page).write_text(page_of(rows, transformers.__version__))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if any("NOT IN OUR WORDS" in row.refused for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
