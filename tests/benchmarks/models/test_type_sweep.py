"""The sweep over transformers' types: what passes, and what is refused in our words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from slipstream_lab.models.type_sweep import (
    TypeRow,
    exact_names,
    kinds_of,
    model_types,
    page_of,
    refusal_of,
)

ROOT = Path(__file__).parents[3]


def test_types_are_those_that_write_text() -> None:
    found = model_types()
    assert found["llama"] == "causal"
    assert found["qwen3_vl"] == "multimodal"
    assert found["qwen3_5"] == "causal, multimodal"
    assert "vit" not in found


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("opt", ""),
        ("lfm2", ""),
        ("mistral3", ""),
        ("bert", "BertLMHeadModel does not attend in a supported way (TypeError: its attention"),
        (
            "musicgen",
            "MusicgenForCausalLM has no language model of its own (ValueError: Multiple valid",
        ),
        ("gemma4_assistant", "its default configuration is not valid (StrictDataclassClass"),
        ("mamba", "its configuration has no maximum length; set max_model_len"),
    ],
)
def test_a_type_passes_or_is_refused_with_the_reason(model_type: str, said: str) -> None:
    assert refusal_of(model_type).startswith(said)
    assert bool(refusal_of(model_type)) == bool(said)


def test_reasons_are_counted_without_names() -> None:
    rows = [
        TypeRow("a", "causal", "AForCausalLM has 3 layers"),
        TypeRow("b", "causal", "BModel has 40 layers"),
        TypeRow("c", "causal", ""),
    ]
    assert kinds_of(rows) == {"… has … layers": 2}


def test_the_page_is_of_the_rows_that_are_kept() -> None:
    kept = json.loads((ROOT / "benchmarks/results/model_types.json").read_text())
    rows = [TypeRow(**row) for row in kept]
    page = page_of(rows, transformers.__version__)
    assert (ROOT / "docs/models.md").read_text() == page
    assert all(f"| {row.model_type} |" in page for row in rows)


def test_variants_are_named_by_their_types() -> None:
    found = exact_names()
    assert found["glm_moe_dsa"] == ["GLM-5, within its index_topk"]
    assert "Qwen3.5" in found["qwen3_5_text"]
    assert "mpt" not in found


@pytest.mark.tool
def test_the_program_prints_a_row_for_each_type(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream_lab.models.type_sweep", "--only", "opt"]
    run = subprocess.run(
        [*command, "--json", str(tmp_path / "rows")], capture_output=True, text=True, check=True
    )
    assert "1 of 1 types pass" in run.stdout
    assert json.loads((tmp_path / "rows").read_text())[0]["model_type"] == "opt"
    wrong = subprocess.run([*command[:-1], "no-type"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "--only: got 'no-type', allowed" in wrong.stderr
