"""A router's counters: by model, as far as there is room."""

from __future__ import annotations

from slipstream.client.placing.router_counters import (
    LONGEST_NAME,
    MOST_PAIRS,
    OTHER_MODELS,
    RouterCounters,
)


def test_models_are_counted_apart() -> None:
    counters = RouterCounters()
    for model in ("one", "two", "one"):
        counters.note_placed(model, "home")
    counters.note_moved("two", "lost")
    assert counters.placed == {("one", "home"): 2, ("two", "home"): 1}
    assert counters.moved == {("two", "lost"): 1}


def test_those_for_which_there_is_no_room_are_counted_together() -> None:
    counters = RouterCounters()
    counters.note_placed("m" * (LONGEST_NAME + 1), "home")
    for number in range(2 * MOST_PAIRS):
        counters.note_placed(str(number), "home")
    apart = {model for model, _ in counters.placed} - {OTHER_MODELS}
    assert apart == {str(number) for number in range(MOST_PAIRS)}
    assert counters.placed[OTHER_MODELS, "home"] == 1 + MOST_PAIRS
    counters.note_placed("0", "home")
    assert counters.placed["0", "home"] == 2
    counters.note_moved("0", "lost")
    assert counters.moved == {(OTHER_MODELS, "lost"): 1}
