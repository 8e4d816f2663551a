"""States come out of the cache's memory, for as many requests as may run."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream_core.config import CoreConfig, SpeculativeConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.host_memory import HostMemory
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner import torch_factory
from slipstream_core.runner.kv_cache_size import block_bytes, no_room
from slipstream_core.runner.state_memory import (
    num_draft_states,
    num_snapshots,
    states_bytes,
    with_states,
)
from slipstream_core.runner.torch_factory import load_runner
from slipstream_lab.models import tiny_models

UNSET = ("max_num_seqs",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == "LFM2")
    tiny_models.save(tiny, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu", dtype="float32")


def config(**settings: Any) -> CoreConfig:
    return CoreConfig(model="m", address="a", **settings)


def test_bytes_are_those_of_all_mixers(model: LoadedModel) -> None:
    assert len(model.states) == 3
    assert model.state_bytes == 3 * 64 * 3 * 4  # layers, channels, inputs of the convolution, bytes
    assert states_bytes(model, config(max_num_seqs=7)) == 7 * model.state_bytes
    assert len(model.geometry) == 1


def test_the_default_is_lowered_with_a_line(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(max_num_seqs=256, card_defaults=UNSET, enable_prefix_caching=False)
    caplog.set_level(logging.INFO)
    assert with_states(model, given, 1 << 30) == given
    assert "max_num_seqs" not in caplog.text
    assert "recurrent states take" in caplog.text
    assert "prefix caching" not in caplog.text
    cache = 100 * model.state_bytes
    assert with_states(model, given, cache).max_num_seqs == 40
    assert "max_num_seqs is 40 instead of 256 by default" in caplog.text


def test_one_that_was_set_is_refused_with_what_would_do(model: LoadedModel) -> None:
    most = tiny_models.MAX_MODEL_LEN
    blocks = (most // 16 + 1) * block_bytes(model, 16)
    cache = 100 * model.state_bytes + blocks
    assert cache > 2 * blocks  # half of it would do
    assert with_states(model, config(max_num_seqs=100), cache).max_num_seqs == 100
    with pytest.raises(ModelLoadError, match=r"seqs 101 needs .* give at most 100, or"):
        with_states(model, config(max_num_seqs=101), cache)
    scarce = 10 * model.state_bytes + blocks  # the model's own length gets half of it alone
    fit = scarce // 2 // model.state_bytes
    assert fit > 10
    assert with_states(model, config(max_num_seqs=fit), scarce).max_num_seqs == fit
    with pytest.raises(ModelLoadError, match=f"give at most {fit}, or"):
        with_states(model, config(max_num_seqs=fit + 1), scarce)
    asked = config(max_num_seqs=11, max_model_len=most)  # and one that was set all it needs
    with pytest.raises(ModelLoadError, match="give at most 10, or more kv_cache_gib, or a lower"):
        with_states(model, asked, scarce)
    for unset in ((), UNSET):
        with pytest.raises(ModelLoadError, match=r"has 0\.00 GiB; give more kv_cache_gib"):
            with_states(model, config(max_num_seqs=1, card_defaults=unset), model.state_bytes)


def test_with_a_number_of_blocks_the_default_alone_is_lowered(model: LoadedModel) -> None:
    cache = 100 * model.state_bytes
    default = config(max_num_seqs=256, card_defaults=UNSET, num_blocks=9)
    assert with_states(model, default, cache).max_num_seqs == 40
    assert with_states(model, default, 0).max_num_seqs == 1
    given = config(max_num_seqs=256, num_blocks=9)
    assert with_states(model, given, cache) == given


def test_too_many_states_are_named_as_such(
    model: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib = 2**30
    memory = HostMemory(2 * gib, 2 * gib, "this machine")
    monkeypatch.setattr(torch_factory, "read_host_memory", lambda: memory)
    num = 3 * gib // model.state_bytes
    given = config(max_num_seqs=num, num_blocks=9, device="cpu", dtype="float32")
    given = replace(given, enable_prefix_caching=False)
    problem = (
        r"GiB \(3\.00 GiB of it recurrent states\).*num_blocks, max_num_seqs, state_cache_gib\)"
    )
    with pytest.raises(ModelLoadError, match=problem):
        load_runner(replace(given, model=str(folder)))
    said = str(no_room(model, given, 9, 3 * gib))
    assert "recurrent states (3.00 GiB)" in said
    assert "lower max_num_seqs, state_cache_gib, kv_cache_gib or num_blocks" in said


def test_the_prefix_cache_keeps_a_share_of_the_cache(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    each, default = model.state_bytes, {"card_defaults": UNSET, "max_num_seqs": 4}
    assert num_snapshots(model, config(**default), 1000 * each) == 100
    assert "keeps up to 100 states" in caplog.text
    assert num_snapshots(model, config(**default), 100 * each) == 16
    assert num_snapshots(model, config(**default), 40 * each) == 10  # a quarter at most
    most = tiny_models.MAX_MODEL_LEN
    blocks = (most // 16 + 1) * block_bytes(model, 16)
    for num_rows in (1, 4):  # states of those who run come first, where their number was set
        given = config(max_num_seqs=num_rows, max_model_len=most)
        assert num_snapshots(model, given, blocks + (num_rows + 3) * each) == 3
    assert num_snapshots(model, config(num_blocks=9, max_num_seqs=999), 100 * each) == 16
    assert num_snapshots(model, config(enable_prefix_caching=False), 1000 * each) == 0
    assert "prefix caching is off" not in caplog.text


def test_drafts_take_states_of_the_cache(folder: Path, model: LoadedModel) -> None:
    each = model.state_bytes
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
    for num, found in ((1000, 32), (200, 20), (40, 8), (8, 2), (3, 0)):
        assert num_draft_states(model, config(speculative_config=drafts), num * each) == found
    assert num_draft_states(model, config(), 1000 * each) == 0
    cache = 1 << 20
    given = CoreConfig(
        model=str(folder),
        address="a",
        device="cpu",
        dtype="float32",
        kv_cache_gib=cache / 2**30,
        max_num_seqs=10,
    )
    found_blocks = []
    for speculative_config in (None, drafts):
        runner = load_runner(replace(given, speculative_config=speculative_config))
        runner.close()
        info = runner.info
        assert info.takes_drafts == (speculative_config is not None)
        assert info.num_draft_states == (32 if info.takes_drafts else 0)
        num_states = info.num_snapshots + info.num_draft_states + 10
        found_blocks.append(runner.num_blocks)
        assert runner.num_blocks == (cache - num_states * each) // block_bytes(model, 16)
    assert found_blocks[1] < found_blocks[0]


def test_a_share_that_was_set_is_kept_or_refused(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    each = model.state_bytes
    most = tiny_models.MAX_MODEL_LEN
    cache = (most // 16 + 1) * block_bytes(model, 16) + 10 * each

    def given(num_states: float, **more: Any) -> CoreConfig:
        gib = num_states * each / 2**30
        return config(max_num_seqs=4, max_model_len=most, state_cache_gib=gib, **more)

    assert num_snapshots(model, given(6), cache) == 6
    with pytest.raises(ModelLoadError, match=r"state_cache_gib is .* \(6 states of .* at most"):
        num_snapshots(model, given(7), cache)
    assert num_snapshots(model, given(7, num_blocks=9), cache) == 7
    assert not caplog.text
    assert num_snapshots(model, given(0), cache) == 0
    assert num_snapshots(model, given(0.5), cache) == 0
    assert caplog.text.count("no room for a state of 0.0 MiB, as state_cache_gib says") == 2
    assert num_snapshots(model, given(1, enable_prefix_caching=False), cache) == 0
    assert "state_cache_gib has no effect" in caplog.text


def test_what_is_said_to_fit_does(model: LoadedModel) -> None:
    big = dataclasses.replace(model, states=100_000 * model.states)  # 221 MiB
    cache = (tiny_models.MAX_MODEL_LEN // 16 + 1) * block_bytes(model, 16) + 10 * big.state_bytes
    given = config(max_num_seqs=7, max_model_len=16, state_cache_gib=5.0)
    with pytest.raises(ModelLoadError, match="give at most that") as error:
        num_snapshots(big, given, cache)
    found = re.search(r"leave ([\d.]+) \((\d) states", str(error.value))
    assert found is not None
    assert found[2] == "3"
    assert num_snapshots(big, replace(given, state_cache_gib=float(found[1])), cache) >= 2


def test_settings_without_room_are_refused_for_what_they_are(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Not as a fault of the prefix cache."""
    cache = 10 * model.state_bytes
    given = config(max_num_seqs=64, max_model_len=16, state_cache_gib=1e-6)
    assert num_snapshots(model, given, cache) == 0
    assert not caplog.text
    with pytest.raises(ModelLoadError, match="max_num_seqs 64 needs"):
        with_states(model, given, cache)


def test_the_default_is_not_lowered_for_blocks_that_come_on_top(model: LoadedModel) -> None:
    default = config(max_num_seqs=256, card_defaults=UNSET, num_blocks=9)
    assert with_states(model, default, 10 * model.state_bytes).max_num_seqs == 4


def test_blocks_get_the_rest(folder: Path, model: LoadedModel) -> None:
    cache = 1 << 21
    given = CoreConfig(
        model=str(folder),
        address="a",
        device="cpu",
        dtype="float32",
        kv_cache_gib=cache / 2**30,
        max_num_seqs=100,
        touches_cache=True,
    )
    runner = load_runner(given)
    states = 100 * model.state_bytes
    try:
        snapshots = runner.info.num_snapshots * model.state_bytes
        assert cache // 10 - model.state_bytes < snapshots <= cache // 10
        assert runner.num_blocks == (cache - states - snapshots) // block_bytes(model, 16)
        assert runner.info.max_num_seqs == 100
        assert runner.info.has_states
    finally:
        runner.close()
    lowered = load_runner(replace(given, max_num_seqs=2000, card_defaults=UNSET))
    try:
        assert lowered.info.max_num_seqs == int(0.4 * (cache - snapshots)) // model.state_bytes
    finally:
        lowered.close()


def test_blocks_of_a_model_that_does_not_attend_take_no_memory(tmp_path: Path) -> None:
    """There are as many as requests of full length need, and as many for prefixes."""
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == "Mamba 2")
    tiny_models.save(tiny, tmp_path)
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "block_size": 16}
    runner = load_runner(CoreConfig(model=str(tmp_path), address="a", **settings))
    try:
        assert runner.num_blocks == 1 + 2 * 3 * (tiny_models.MAX_MODEL_LEN // 16 + 1)
        assert runner.info.max_model_len == tiny_models.MAX_MODEL_LEN
        assert runner.info.block_bytes == 0
    finally:
        runner.close()
