"""Warnings that come again and again."""

from __future__ import annotations

import logging

import pytest

from slipstream_ipc.telemetry.recent_warnings import RecentWarnings

logger = logging.getLogger(__name__)


def test_a_warning_that_comes_again_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RecentWarnings(logger)
    for _ in range(3):
        warnings.warn("%s is away: %s", "a", "no route")
        warnings.warn("%s is away: %s", "a", "refused")
    assert caplog.messages == ["a is away: no route", "a is away: refused"]
    warnings.forget()
    warnings.warn("%s is away: %s", "a", "refused")
    assert caplog.messages[2:] == ["a is away: refused"]


def test_few_are_remembered(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RecentWarnings(logger)
    for number in (*range(1000), 0):
        warnings.warn("number %d", number)
    assert len(caplog.messages) == 1001
    assert len(warnings._texts) < 100
