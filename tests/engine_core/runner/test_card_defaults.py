"""What a step holds by default, by the card's memory."""

from __future__ import annotations

import logging

import pytest

from slipstream_core.config import CoreConfig
from slipstream_core.runner.card_defaults import LARGE_BYTES, with_card_defaults
from slipstream_core.runner.factory import with_device_defaults

UNSET = CoreConfig(model="m", address="a", card_defaults=("max_num_seqs", "max_num_batched_tokens"))


def test_a_large_card_has_larger_steps_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = with_card_defaults(UNSET, 80 << 30)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (1024, 8192)
    assert "the card has 80 GiB, so by default: max_num_seqs 1024, max_num_batched" in caplog.text


@pytest.mark.parametrize("total", [0, 24 << 30, LARGE_BYTES - 1])
def test_others_keep_theirs(total: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert with_card_defaults(UNSET, total) is UNSET
    assert caplog.text == ""


def test_what_was_set_stays() -> None:
    chosen = CoreConfig(
        model="m", address="a", max_num_seqs=7, card_defaults=("max_num_batched_tokens",)
    )
    config = with_card_defaults(chosen, LARGE_BYTES)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (7, 8192)
    assert with_card_defaults(CoreConfig(model="m", address="a"), LARGE_BYTES).max_num_seqs == 256


def test_a_simulated_device_has_no_card() -> None:
    simulated = CoreConfig(model="simulated:", address="a", card_defaults=UNSET.card_defaults)
    assert with_device_defaults(simulated) is simulated
