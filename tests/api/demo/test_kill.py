"""`slipstream demo kill`: its picture, and the whole with the demo model."""

from __future__ import annotations

import re

import pytest

from slipstream.cli.main import main
from slipstream.demo.screen import BOLD, MARK, Pane, ScreenView, columns_of, frame, wrapped


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def texts(rows) -> list[str]:
    return ["".join(char for char, _ in row) for row in rows]


def test_text_is_wrapped_at_spaces():
    rows = wrapped([("one two three", ""), ("four\nfive", BOLD)], 9)
    assert texts(rows) == ["one two", "threefour", "five"]
    assert texts(wrapped([("x" * 25, "")], 10)) == ["x" * 10, "x" * 10, "x" * 5]
    assert texts(wrapped([("漢字漢字", "")], 5)) == ["漢字", "漢字"]


def test_a_text_cannot_steer_the_terminal():
    (row,) = wrapped([("a\x1b[2Jb\r", "")], 20)
    assert "\x1b" not in texts([row])[0]
    assert "\r" not in texts([row])[0]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (41, 12), (200, 60)])
@pytest.mark.parametrize("num_panes", [1, 2, 3, 4])
def test_a_frame_fits_the_terminal(width, height, num_panes):
    panes = [
        Pane(f"stream {number}", "7 tokens", [("漢字 and words " * 90, ""), ("[gone]", MARK)])
        for number in range(num_panes)
    ]
    view = ScreenView(
        "title", panes, [("worker 12", BOLD)], [(f"event {at}", "") for at in range(9)]
    )
    lines = frame(view, width, height)
    assert len(lines) <= height
    for line in lines:
        assert sum(map(columns_of, plain(line))) <= width
    shown = "\n".join(map(plain, lines))
    assert "event 8" in shown
    assert "event 0" not in shown
    assert shown.count("stream") >= (num_panes if width > 60 else 1)
    assert "[gone]" in shown.replace("\n", "") or width < 60  # the end of the text is what is shown


@pytest.mark.process
def test_demo_kill_tells_that_nothing_changed(capsys):
    code = main(["demo", "kill"])
    shown, progress = capsys.readouterr()
    assert code == 0, shown
    assert re.search(r"^spares: ready after \d+", progress, re.M)
    assert len(re.findall(r"^--- stream", shown, re.M)) <= 4  # the answers that met a death
    assert shown.endswith("\nnothing was lost\n")
    assert "[worker killed]" in shown
    assert "[core killed]" in shown
    assert shown.count("12 of 12 answers identical") == 2
    assert re.search(r"worker killed +after \d+ tokens, back after \d", shown)
