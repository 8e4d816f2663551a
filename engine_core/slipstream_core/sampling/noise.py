"""Sampling noise as a pure function of (seed, position, token id), and draws with it.

There is no generator state, so a request samples the same tokens alone, in any batch, after a
preemption and after a restart of the process.

- `position` is the sampled token's index in its sequence, so no two draws of a request share it.
- A second, independent draw for the same position takes another `stream`. The stream is mixed
  into the key in a separate round; folded into the position's bits it would be lost for large
  positions, and a retry would repeat its first draw forever.
- The key is made on the host by numpy, the noise on the device by torch. Both use the 32-bit
  finaliser of MurmurHash3 (Austin Appleby, public domain) in wrapping int32 arithmetic, for which
  CPUs and GPUs have vector instructions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_ipc.arrays import Int32s, Int64s, UInt32s

_MUL_1 = 0x85EBCA6B
_MUL_2 = 0xC2B2AE35
_MOST = 2.0**31 - 128  # of 31 bits as float32; above, the noise would be infinite
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive positions and streams

# Elements per chunk of whole-vocabulary draws on a CPU: temporaries of 512 KiB stay in its cache,
# which halves the time of a large batch.
_CPU_CHUNK = 1 << 17


def row_keys(seeds: Int64s, positions: npt.NDArray[np.integer], stream: int = 0) -> Int32s:
    """Two 32-bit keys for each of S draws, int32 [2, S], from seeds [S] and positions [S]."""
    bits = seeds.astype(np.uint64)  # negative seeds wrap
    low, high = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
    key = _mix(low ^ np.uint32(0x5BD1E995))
    key = _mix(key + high)
    key = _mix(key ^ positions.astype(np.uint32) * np.uint32(_GOLDEN))
    key = _mix(key + np.uint32(stream * _GOLDEN & 0xFFFFFFFF))
    return np.stack([key, _mix(key ^ np.uint32(0x3C6EF372))]).view(np.int32)


def exponential(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exp(1) noise, float32 [S, N], for keys int32 [2, S] and token ids int32 [N] or [S, N].

    `argmax(logits - log(noise))` then samples from softmax(logits): the token whose exponential
    clock rings first. Noise near 0 decides, so 31 bits become a float through log1p, which keeps
    the relative precision of small values. It is finite: a token that alone is allowed is drawn.
    """
    bits = token_ids ^ keys[0, :, None]
    scratch = torch.empty_like(bits)
    _mix_(bits, scratch)
    bits.add_(keys[1, :, None])  # with one round, two keys could permute the same noise
    _mix_(bits, scratch)
    bits.bitwise_and_(0x7FFFFFFF)
    return bits.float().clamp_(max=_MOST).add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()


def draw(scaled: torch.Tensor, keys: torch.Tensor, vocab: torch.Tensor) -> torch.Tensor:
    """One token per row from softmax(scaled), int64 [S]; keys int32 [2, S]."""
    return best_scores(scaled, keys, vocab)[1]


def best_scores(
    scaled: torch.Tensor, keys: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row's logits with noise, and its column; [S] each.

    scaled: [S, N], of the `ids`, int32 [N]. keys: int32 [2, S].
    """
    chunk = rows_per_chunk(scaled)
    best, columns = [], []
    for part, part_keys in zip(
        torch.split(scaled, chunk), torch.split(keys, chunk, 1), strict=True
    ):
        noisy = part - exponential(part_keys, ids).log_()
        columns.append(noisy.argmax(-1))  # by torch: recordings replay its operators alone
        best.append(noisy.gather(1, columns[-1][:, None])[:, 0])
    return (best[0], columns[0]) if len(best) == 1 else (torch.cat(best), torch.cat(columns))


def rows_per_chunk(scaled: torch.Tensor) -> int:
    """The rows of [S, N] that are drawn at once; all of them on a card."""
    if scaled.device.type != "cpu":
        return len(scaled)
    return max(1, _CPU_CHUNK // scaled.shape[1])


def _mix(x: UInt32s) -> UInt32s:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_MUL_1)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(_MUL_2)
    return x ^ (x >> np.uint32(16))


def _mix_(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """The same finaliser in place on int32, with masks because right shifts extend the sign."""
    for shift, multiplier in ((16, _MUL_1), (13, _MUL_2)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(multiplier - (1 << 32))
    torch.bitwise_right_shift(x, 16, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_(0xFFFF))
