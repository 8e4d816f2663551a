"""Joins the ranks of a core into torch's process group, on one machine.

The ranks meet in a file of memory that all of them have inherited, so nothing listens for that and
nothing is left behind. What gloo and NCCL open afterwards is bound to loopback.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from slipstream_core.config import CoreConfig
from slipstream_core.runner.sharding.collectives import exchange_by, least_over_ranks
from slipstream_core.runner.sharding.exchange import SharedExchange
from slipstream_core.runner.sharding.rank import Rank

JOIN_S = 1800.0  # for a collective while ranks load, which may read files at different speeds
_LOOPBACK = "lo"
_Distributed: Any = distributed  # in part without annotations


def device_type(config: CoreConfig) -> str:
    """cuda or cpu: what the ranks compute on."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def join_group(
    rank: Rank, device_type: str, meeting_fd: int, exchange_fd: int | None, timeout_s: float
) -> None:
    """Wait until all ranks have joined. A collective that takes longer than `timeout_s` raises.

    device_type: cuda or cpu. meeting_fd, exchange_fd: files in memory that all ranks have, empty at
    first: where they meet, and through which CPUs exchange; None: by gloo alone. Raises
    RuntimeError.
    """
    os.environ.update(
        GLOO_SOCKET_IFNAME=_LOOPBACK,
        NCCL_SOCKET_IFNAME=_LOOPBACK,
        # whether a step hangs, the core alone decides
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        # transformers places a rank by it
        LOCAL_RANK=str(rank.index),
    )
    on_card = device_type == "cuda"
    if on_card:
        torch.cuda.set_device(rank.index)
    else:  # transformers loads slices onto cards where torch finds any
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    store = _Distributed.FileStore(f"/proc/self/fd/{meeting_fd}", rank.size)
    _Distributed.init_process_group(
        "nccl" if on_card else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank.index) if on_card else None,
    )
    if on_card or exchange_fd is None:
        return
    exchange = None
    with contextlib.suppress(OSError):  # without a compiler
        exchange = SharedExchange(exchange_fd, rank, timeout_s)
    if least_over_ranks(int(exchange is not None), torch.device("cpu")):
        exchange_by(exchange)


def leave_group() -> None:
    """Undo `join_group`; without effect where there is no group."""
    exchange_by(None)
    if _Distributed.is_initialized():
        _Distributed.destroy_process_group()
