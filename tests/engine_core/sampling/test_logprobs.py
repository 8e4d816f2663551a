"""Log-probabilities by way of a card's copies are those that are computed in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.host_device import HostCopies

from slipstream_core.sampling import logprobs as module
from slipstream_core.sampling.logprobs import PendingLogprobs, candidates
from slipstream_ipc.history.wide_logprobs import Candidates

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


@pytest.mark.parametrize("at_once", [2**22, 100], ids=["one piece", "several"])
@pytest.mark.parametrize("held", [64 << 20, 0], ids=["coming", "waited for"])
@pytest.mark.parametrize("num", [0, 3, 500])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_copies_change_nothing(
    monkeypatch: pytest.MonkeyPatch, at_once: int, held: int, num: int, rows: int
) -> None:
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_HELD_BYTES", held)
    vocab = 50
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    token_ids = torch.arange(rows) * 7 % vocab
    plain = candidates(logits, token_ids, num)
    assert isinstance(plain, Candidates)
    coming = candidates(logits, token_ids, num, HostCopies())
    assert isinstance(coming, PendingLogprobs)
    found = coming.wait()
    assert np.array_equal(found.values, plain.values)
    assert np.array_equal(found.ids, plain.ids)
    assert np.array_equal(found.ranks, plain.ranks)
    assert (found.values.dtype, found.ids.dtype) == (np.float32, np.uint32)
    listed = np.array([3, 3, vocab - 1, 0, 8])
    plain = candidates(logits, token_ids, 4, None, listed)
    assert isinstance(plain, Candidates)
    coming = candidates(logits, token_ids, 4, HostCopies(), listed)
    assert isinstance(coming, PendingLogprobs)
    named = coming.wait()
    assert np.array_equal(named.values, plain.values)
    assert np.array_equal(named.ids, plain.ids)
    if rows:
        assert plain.ids[:, 1:].tolist() == [[3, 3, vocab - 1, 0]] * rows
        wanted = torch.from_numpy(plain.ids.astype(np.int64))
        assert plain.values == pytest.approx(
            logits.log_softmax(-1).gather(1, wanted).numpy(), abs=1e-5
        )
    plain = candidates(logits, token_ids, num)
    assert isinstance(plain, Candidates)
    if rows:
        expected = logits.log_softmax(-1)
        assert plain.values.shape == (rows, 1 + min(num, vocab))
        assert plain.values[:, 0] == pytest.approx(
            expected.gather(1, token_ids[:, None])[:, 0].numpy(), abs=1e-5
        )
        order = expected.sort(descending=True)
        assert plain.values[:, 1:] == pytest.approx(order.values[:, :num].numpy(), abs=1e-5)
        assert plain.ids[:, 1:].tolist() == order.indices[:, :num].tolist()
