"""Steps that ranks sample from slices, by both ways of exchange: the tokens of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.helpers.torch_driver import (
    BLOCK,
    KINDS,
    VOCAB,
    Driver,
    assert_undefined_behind,
    requests_of,
    save_model,
    save_undefined,
    undefined_by,
)

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.leader import load_lead
from slipstream_core.ranks.processes import Ranks
from slipstream_core.runner import sample_stage
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.step.plan import Runner

pytestmark = pytest.mark.process


def outputs(runner: Runner) -> list[list[list[int]]]:
    found = []
    for kind in KINDS:
        some = requests_of(kind)
        Driver(runner, budget=12).run(some)  # type: ignore[arg-type]
        found.append([it.output for it in some])
    return found


def never(ended: object) -> None:
    raise AssertionError(ended)


@pytest.mark.parametrize(
    ("size", "native"),
    [
        pytest.param(2, False, id="2-gloo"),
        pytest.param(4, True, id="4-memory"),
        pytest.param(4, False, id="4-gloo"),
    ],
)
def test_ranks_sample_what_one_does(
    size: int, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `native` forwards are eager, too."""
    assert VOCAB % size  # the last slice is shorter
    config = CoreConfig(
        model=str(save_model(tmp_path)),
        address="unused",
        device="cpu",
        dtype="float32",
        native=native,
        block_size=BLOCK,
        num_blocks=60,
        max_num_seqs=8,
        threads=1,
    )
    alone = load_runner(config)
    try:
        expected = outputs(alone)
    finally:
        alone.close()
    config = replace(config, tensor_parallel_size=size)
    lead = load_lead(config, Ranks(config, never))
    try:
        monkeypatch.delattr(sample_stage, "sample")  # of whole rows
        assert outputs(lead) == expected
    finally:
        lead.close()


@pytest.mark.parametrize("native", [False, True], ids=["gloo", "memory"])
def test_ranks_tell_which_rows_have_logits_that_are_not_numbers(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [requests_of(kind) for kind in KINDS]
    token = requests[0][1].prompt[-1]
    (tmp_path / "sound").mkdir()
    save_undefined(save_model(tmp_path / "sound"), tmp_path, token)
    config = CoreConfig(
        model=str(tmp_path),
        address="unused",
        device="cpu",
        dtype="float32",
        native=native,
        block_size=BLOCK,
        num_blocks=60,
        max_num_seqs=8,
        threads=1,
        tensor_parallel_size=2,
    )
    lead = load_lead(config, Ranks(config, never))
    try:
        monkeypatch.delattr(sample_stage, "sample")  # of whole rows
        for some in requests:
            assert_undefined_behind(token, some, undefined_by(lead, some))
    finally:
        lead.close()
