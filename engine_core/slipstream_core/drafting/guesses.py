"""Drafts of some rows in place of another drafter's, as many as are worth their time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slipstream_core.drafting.drafter import Drafts
from slipstream_core.drafting.step_costs import StepCosts

_MAX_ROWS_WEIGHED = 64


class Guess(NamedTuple):
    """The tokens that may follow those of a row; each is right as often as `share` if those in
    front of it are.
    """

    token_ids: list[int]
    share: float


def with_guesses(
    others: Drafts | None,
    guesses: Mapping[int, Guess],
    num_rows: int,
    costs: StepCosts,
    num_beside: int,
) -> list[list[int]]:
    """The drafts of each of `num_rows` rows: those of `guesses`, by index, that give most tokens a
    second beside the others' drafts, which stand for the other rows. num_beside: tokens of prompts
    that the step computes besides.
    """
    drafts: list[list[int]] = [[]] * num_rows if others is None else _by_row(others)
    num_others = sum(len(each) for at, each in enumerate(drafts) if at not in guesses)
    values = {
        at: guess.share ** np.arange(1, 1 + len(guess.token_ids)) for at, guess in guesses.items()
    }
    every = -np.sort(-np.concatenate([np.empty(0), *values.values()]))
    num = costs.num_worthwhile(num_rows + num_others, every, num_beside)
    least = every[num - 1] if num else np.inf
    for at, guess in guesses.items():
        drafts[at] = guess.token_ids[: int(np.count_nonzero(values[at] >= least))]
    return drafts


def joined(drafts: list[list[int]]) -> Drafts | None:
    """The drafts of rows as a step has them; None if there are none."""
    lens = np.array([len(each) for each in drafts])
    if not lens.any():
        return None
    return Drafts(lens, np.concatenate([np.array(each, np.int64) for each in drafts]))


def pays(costs: StepCosts, num_rows: int, shares: Sequence[float], most: int) -> bool:
    """True if drafts make a step of `num_rows` rows worth its time.

    shares: of each row that has drafts, `most` at most, how often one is right. All are weighed
    together: a step takes long by tiles of rows, so that one draft alone may not pay where many do.
    """
    likeliest = np.array(sorted(shares, reverse=True)[:_MAX_ROWS_WEIGHED], np.float64)
    values = np.sort(likeliest[:, None] ** np.arange(1, most + 1), axis=None)
    return costs.num_worthwhile(num_rows, np.asarray(values[::-1], np.float64)) > 0


def _by_row(drafts: Drafts) -> list[list[int]]:
    ends = np.cumsum(drafts.lens)
    return [
        drafts.token_ids[end - num : end].tolist()
        for num, end in zip(drafts.lens.tolist(), ends.tolist(), strict=True)
    ]
