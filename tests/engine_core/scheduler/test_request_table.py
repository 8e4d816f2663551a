"""The scheduler's columns of requests."""

from __future__ import annotations

import numpy as np
from tests.helpers.new_requests import new_request

from slipstream_core.scheduler.request_table import NO_SLOT, RequestTable


def test_a_row_that_no_request_has_holds_no_slot_however_the_columns_grew() -> None:
    requests = RequestTable(rows=1)
    requests.add(
        new_request(
            row=4, prompt_len=1, max_tokens=1, temperature=0, top_k=0, top_p=1, min_p=0, seed=0
        ),
        known=1,
        limit=2,
        run_ahead=1,
    )
    assert len(requests.slot) > 4
    assert (requests.slot == NO_SLOT).all()
    assert np.flatnonzero(requests.alive).tolist() == [4]
    assert (requests.num_logprobs == -1).all()
