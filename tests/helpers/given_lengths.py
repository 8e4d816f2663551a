"""How many tokens the steps of a simulated device give to a row, in a test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner


def give(runner: SimulatedRunner, counts: Sequence[int]) -> None:
    """Have the steps of `runner` give each row as many tokens as `counts` says in turn."""
    draw = cycle(counts)
    runner.draw_lengths = lambda hashes: np.fromiter(islice(draw, len(hashes)), np.int64)
