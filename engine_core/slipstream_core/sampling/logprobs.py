"""Log-probabilities of given tokens and of the most likely ones, from logits.

Used for rows that want more than the sampler's columns hold, and for prompts. The vocabulary is
processed a bounded number of logits at a time.

- On a card the result is a `PendingLogprobs` until its step is done, and nothing waits. Only a
  result of more than `_HELD_BYTES` is waited for piece by piece, as all of it would otherwise lie
  on the card and in pinned memory at once.
- Results are copied out of pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slipstream_core.sampling.top_tokens import most_likely
from slipstream_core.step.buffer import Field, Layout
from slipstream_core.step.staging import Copies, CopyEvent, in_device, to_device
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.wide_logprobs import Candidates, joined

_LOGITS_AT_ONCE = 2**22  # temporaries of 16 MiB each
_HELD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows' results being copied to the host. Keeps the copy's source alive."""

    layout: Layout
    width: int
    source: torch.Tensor
    target: torch.Tensor
    event: CopyEvent

    def wait(self) -> Candidates:
        self.event.synchronize()
        views = self.layout.in_host(self.target.numpy())
        values, ids = (views[name].reshape(-1, self.width) for name in ("values", "ids"))
        return Candidates(
            values.astype(np.float32), ids.astype(np.uint32), views["ranks"].astype(np.uint32)
        )


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Candidates being copied from a card."""

    pieces: tuple[_Piece | Candidates, ...]
    width: int

    def wait(self) -> Candidates:
        """Wait for the copies and return the candidates."""
        return joined([arrived(piece) for piece in self.pieces], self.width)


def arrived(those: Candidates | PendingLogprobs | _Piece) -> Candidates:
    """The candidates, waiting for their copies if necessary."""
    return those if isinstance(those, Candidates) else those.wait()


def candidates(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_logprobs: int,
    copies: Copies | None = None,
    listed: Int64s | None = None,
) -> Candidates | PendingLogprobs:
    """Log-probabilities of each row's token and of its `num_logprobs` most likely ones.

    `logits` is [N, vocab], `token_ids` int64 [N] on the same device. `listed` [num_logprobs or
    more] are ids that replace the most likely ones. With `copies` the result is pending.
    """
    if listed is not None:
        listed = listed[:num_logprobs]
    rows = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    width = 1 + (min(num_logprobs, logits.shape[1]) if listed is None else len(listed))
    is_large = 8 * len(logits) * width > _HELD_BYTES
    pieces: list[_Piece | Candidates] = []
    for begin in range(0, len(logits), rows):
        some = slice(begin, begin + rows)
        values, ids, ranks = _columns(logits[some].float(), token_ids[some], width - 1, listed)
        if copies is None:
            pieces.append(
                Candidates(
                    values.numpy(), ids.int().numpy().view("u4"), ranks.int().numpy().view("u4")
                )
            )
            continue
        piece = _fetch(copies, values, ids, ranks)
        pieces.append(piece.wait() if is_large else piece)
    coming = PendingLogprobs(tuple(pieces), 1 + num_logprobs)
    return coming.wait() if copies is None else coming


def _columns(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, listed: Int64s | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(-1) + 1
    values, ids = own, token_ids[:, None]
    if listed is not None:
        wanted = to_device(listed, logits.device).expand(len(logits), -1)
        values = torch.cat([own, logits.gather(1, wanted)], 1)
        ids = torch.cat([ids, wanted], 1)
    elif num:
        top_values, top_ids = most_likely(logits, num)
        values, ids = torch.cat([own, top_values], 1), torch.cat([ids, top_ids], 1)
    return values - logits.logsumexp(-1, keepdim=True), ids, ranks


def _fetch(copies: Copies, values: torch.Tensor, ids: torch.Tensor, ranks: torch.Tensor) -> _Piece:
    num, width = values.shape
    layout = Layout(
        [
            Field("values", np.float32, num * width),
            Field("ids", np.int32, num * width),
            Field("ranks", np.int32, num),
        ]
    )
    source = torch.empty(layout.size, dtype=torch.uint8, device=values.device)
    views = in_device(layout, source)
    for name, column in (("values", values), ("ids", ids), ("ranks", ranks)):
        views[name].copy_(column.reshape(-1))
    target = copies.host(layout.size)
    return _Piece(layout, width, source, target, copies.fetch(source, target))
